"""Data with an iterator over it, and where that stands; it goes to the position of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import jax

from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.layers.marking import article
from jaxpp_flax.messages import warn_user
from jaxpp_flax.trainers.data.position import BEGINNING, DataPosition, examples_in
from jaxpp_flax.trainers.errors import DataPositionError
from jaxpp_flax.trainers.progress import Display

__all__ = ["ResumeData", "DataSource", "named"]

ResumeData = Literal["fast_forward", "refuse", "restart"]

# No bar is shown for fewer batches than this.
_WORTH_A_BAR = 100
_GRAIN = ("get_state", "set_state")  # of an iterator
_TORCH = ("state_dict", "load_state_dict")  # of a loader of torchdata or a dataset of Hugging Face, or of an iterator


def named(data: Any) -> str:
    """Return the name of the class of `data`, with its article.

    Example:
      >>> named([]), named(iter({}.items()))
      ('a list', 'a dict_itemiterator')
      >>> named(type("Indexed", (), {})())
      'an Indexed'
    """
    name = type(data).__name__
    return f"{article(name)} {name}"


def keeps_order(data: Any) -> bool:
    """Return True if all passes over `data` are equal; a subclass of a list may shuffle them.

    Example:
      >>> keeps_order([1, 2]), keeps_order(iter([1, 2]))
      (True, False)
    """
    return type(data) in (list, tuple, range)


class DataSource:
    """Data, an iterator over it, and where that stands.

    The order of data is noted with the position unless the data has its own state: it may change from run to run, as a
    program may shuffle a list too.

    Args:
      at: where the iterator stands in its pass, if it has been used before.
    """

    def __init__(self, data: Iterable[Any], iterator: Iterator[Any], display: Display, at: DataPosition | None) -> None:
        self.data, self.iterator, self.display = data, iterator, display
        self.at = at or BEGINNING
        self._hashes = self._methods() is None

    def _methods(self) -> tuple[Any, str, str] | None:
        """Return the object with the data's own state, the iterator or the data, and the names of its two methods."""
        # The loader before its iterator: torchdata's iterators have the methods too, but cannot go back.
        for owner, names in ((self.iterator, _GRAIN), (self.data, _TORCH), (self.iterator, _TORCH)):
            if all(callable(getattr(owner, name, None)) for name in names):  # a subclass may set them to None
                return owner, names[0], names[1]
        return None

    def state(self) -> Any:
        """Return a copy of the data's own state, or None: its method may return the object that each draw changes."""
        if (methods := self._methods()) is None:
            return None
        owner, get, _ = methods
        state = getattr(owner, get)()
        try:
            return copy.deepcopy(state)
        except Exception:  # a checkpoint cannot hold it either: `DataPosition.to_json` refuses it by name
            return state

    def set_state(self, state: Any) -> None:
        """Go to a state; the data takes a copy."""
        owner, _, set_name = self._methods() or (self.iterator, "", "set_state")
        getattr(owner, set_name)(copy.deepcopy(state))
        if owner is not self.iterator:
            self.iterator = iter(self.data)

    def has_state(self, position: DataPosition) -> bool:
        """Return True if the data goes to `position` by its own state; else batches are drawn up to `position`."""
        return position.iterator is not None and self._methods() is not None

    def here(self) -> DataPosition:
        """Return the position between two draws. If a draw is interrupted, the iterator may have moved on."""
        if (state := self.state()) is None and self.at.in_epoch:
            return self.at
        return replace(self.at, iterator=state, batch_size=self.at.batch_size if self.at.in_epoch else None)

    def note(self, batch: Any) -> int | None:
        """Note a batch that the iterator has given; return its number of examples."""
        leaves = jax.tree.leaves(batch)
        is_sized = not isinstance(batch, Microbatches)
        self.at = self.at.after(leaves, hashes=self._hashes, is_sized=is_sized)
        return examples_in(leaves) if is_sized else None

    def begin_pass(self) -> None:
        """Begin the next pass; data that has `set_epoch`, such as Hugging Face's, is told its number."""
        self.at = self.at.next_pass()
        self._tell_pass()
        self.iterator = iter(self.data)

    def _tell_pass(self) -> None:
        if self.at.epoch and callable(tell := getattr(self.data, "set_epoch", None)):
            tell(self.at.epoch)

    # ------------------------------------------------------------------ to the position of a checkpoint

    def seek(self, position: DataPosition, how: ResumeData) -> None:
        """Go to `position`; `how` is the method for data without its own state.

        If batches are arrays, their examples are counted, so that the batch size may change between runs.

        Raises:
          DataPositionError: if the data ends before the position, or is past it, or is not to be drawn again.
        """
        self._seek_pass(position, how)
        self.at = replace(self.at, epoch=position.epoch)
        if self.has_state(position):
            self._tell_pass()
            self.set_state(position.iterator)
            size = position.batch_size if position.in_epoch else self.at.batch_size
            self.at = replace(position, iterator=None, batch_size=size, order=None)
            return
        left = self._left(position)
        if left < 0:
            raise DataPositionError(
                f"the checkpoint was written after {position.in_epoch} batches of a pass over the data, but "
                f"{self.at.in_epoch} are drawn from this {type(self.iterator).__name__}, which cannot go back. Pass "
                "data that starts at its beginning."
            )
        if left and how == "refuse":
            raise DataPositionError(
                f"the checkpoint was written after {position.in_epoch} batches of a pass over the data, and a "
                f"{type(self.iterator).__name__} has no `set_state`. Use an iterator with get_state and set_state "
                'such as grain\'s; or resume_data="fast_forward" draws these batches and drops them.'
            )
        if left:
            with _bar(position.in_epoch - self.at.in_epoch, "", self.display) as tell:
                self._drop(position, tell)
            self._compare_order(position)
        self.at = replace(self.at, batches=position.batches)

    def _seek_pass(self, position: DataPosition, how: ResumeData) -> None:
        """Begin the pass of `position`; the iterator is the first one that the data has made.

        All passes over a list are equal. Other data may give each pass a new order, so it goes through the passes
        before.
        """
        data, owner = self.data, (self._methods() or (None,))[0]
        if not position.epoch or self.iterator is data or keeps_order(data):
            return
        if self.has_state(position):
            for _ in range(position.epoch if owner is self.iterator else 0):  # a loader may count its passes
                self.iterator = iter(data)
            return
        if how == "refuse":
            raise DataPositionError(
                f"the checkpoint was written in pass {position.epoch + 1} over the data, and the order of a pass over "
                f"a {type(data).__name__} may depend on the passes before. Use an iterator with get_state and "
                'set_state such as grain\'s, or a list; or resume_data="fast_forward" draws these passes and drops '
                "them."
            )
        count = position.batches - position.in_epoch
        with _bar(count, f"of {position.epoch} passes, since the next order may depend on them", self.display) as tell:
            done = 0
            for _ in range(position.epoch):
                for _ in self.iterator:
                    done += 1
                    tell(done)
                self.begin_pass()

    def _left(self, position: DataPosition) -> int:
        """Return the number of examples up to the position; the number of batches, if examples are not known."""
        if position.examples is None or self.at.examples is None:
            return position.in_epoch - self.at.in_epoch
        return position.examples - self.at.examples

    def _drop(self, position: DataPosition, tell: Callable[[int], None]) -> None:
        """Draw and drop batches up to the position."""
        done, size = 0, None
        while (left := self._left(position)) > 0:
            try:
                batch = next(self.iterator)
            except StopIteration:
                raise DataPositionError(
                    f"the checkpoint was written after {position.in_epoch} batches of a pass over the data, but this "
                    f'data ended after {self.at.in_epoch}. Pass the same data, or resume_data="restart" to start it '
                    "again."
                ) from None
            size, done = self.note(batch), done + 1
            tell(done)
        if left < 0:
            raise DataPositionError(
                f"the checkpoint was written after {position.examples} examples of a pass over the data, in batches of "
                f"{position.batch_size}. Batches of {size} do not end there. Use a batch size that divides "
                f'{position.examples}, or resume_data="restart" to start the data again.'
            )

    def _compare_order(self, position: DataPosition) -> None:
        """Warn if the batches before the position are others than in the run before; tell if that cannot be known."""
        if not self._hashes or self.at.batch_size != position.batch_size:  # in batches of another size
            return
        name = f"the data ({named(self.data)})"
        place = f"up to batch {position.in_epoch} of pass {position.epoch + 1}"
        if position.order is None or self.at.order is None:
            if keeps_order(self.data):  # few programs shuffle a list, and each run with JAX arrays would be told
                return
            why, remedy = "the checkpoint does not tell", "Give an iterator with get_state and set_state."
            if jax.process_count() > 1:
                why = "each process reads a part"
            elif self.at.order is None:
                why = "they are no NumPy arrays"
                remedy = "Give NumPy arrays, or an iterator with get_state and set_state."
            self.display.message(
                f"{name} was drawn again {place}. Whether these are the batches of the run before is not known: "
                f"{why}. {remedy}"
            )
        elif position.order != self.at.order:
            warn_user(
                f"{name} does not draw the order of the run before: {place} it has drawn other batches. The run goes "
                "on, but it may repeat examples and leave others out. Shuffle with a fixed seed, or give the iterator "
                "get_state and set_state, as grain's have.",
                UserWarning,
            )

    def check_batch_size(self, position: DataPosition, size: int | None) -> None:
        """Refuse another batch size in the first batch after `seek`: the data's own state counts batches.

        If it is refused, `at` counts batches of the new size: these are what the iterator has given.
        """
        before = position.batch_size
        if not self.has_state(position):
            return  # examples were counted
        if size is None or before is None or size == before:
            return
        if size < before and self._is_last():
            return  # the rest of a pass
        self.at = replace(self.at, examples=self.at.in_epoch * size, batch_size=size)
        raise DataPositionError(
            f"the checkpoint was written with batches of {before} examples, and this data gives batches of "
            f"{size}: the saved state of the iterator counts batches of the old size. Use batches of "
            f'{before} examples, or resume_data="restart" to start the data again.'
        )

    def _is_last(self) -> bool:
        """Return True if the iterator has no further batch; the position of the iterator does not change."""
        state, nothing = self.state(), object()
        try:
            return next(self.iterator, nothing) is nothing
        finally:
            self.set_state(state)


@contextmanager
def _bar(count: int, of: str, display: Display) -> Generator[Callable[[int], None]]:
    """Show the progress of drawing `count` batches, if it may take long."""
    if count < _WORTH_A_BAR:
        yield lambda _: None
        return
    display.message(f"fast-forwarding the data by {count} batches{of and ' '}{of}")
    display.start(count, 0)
    try:
        yield display.advance
    finally:
        display.stop()
