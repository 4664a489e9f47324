"""The stream of batches: from any iterable of pytrees of arrays, in one pass or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from jaxpp_flax.counts import check_count
from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.data.position import (
    DataPosition,
    Drawn,
    ResumeData,
    check_batch_size,
    has_own_state,
    named,
    seek,
    seek_pass,
    state_of,
)
from jaxpp_flax.trainers.data.remainder import RemainderRule
from jaxpp_flax.trainers.progress import Display


class Batches(Iterator[Any]):
    """The batches of `data`, at most `steps` of them, in at most `epochs` passes; the iterator knows its position.

    Without `steps` and `epochs`: one pass. With `steps` alone, a list or dataset is repeated as needed; a generator
    ends when it has no more batches. Data that cannot be iterated, or iterated again as often as `epochs` asks, are
    refused.

    Args:
      steps: counts without the batches before `position`.
      epochs: counts with the passes before `position`.
      resume_data: how to reach the position if `data` has no `set_state`.
      display: shows the progress towards the position.
      drawn: from `drawn_from`, if `data` is an iterator that has been used before.
      remainder: the rule for batches of another size than the first one; None: batches are not changed.

    Example:
      >>> list(Batches([1, 2, 3], steps=5)), list(Batches([1, 2], epochs=2))
      ([1, 2, 3, 1, 2], [1, 2, 1, 2])
      >>> source = Batches([5, 6, 7], steps=5)
      >>> [next(source) for _ in range(4)], source.position().epoch, source.position().in_epoch
      ([5, 6, 7, 5], 1, 1)
      >>> list(Batches([5, 6, 7], steps=1, position=source.position()))
      [6]
      >>> list(Batches([5, 6, 7], steps=1, position=source.position_after(3)))
      [5]
    """

    def __init__(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        position: DataPosition | None = None,
        resume_data: ResumeData = "fast_forward",
        display: Display | None = None,
        drawn: Drawn | None = None,
        remainder: RemainderRule | None = None,
    ) -> None:
        steps = None if steps is None else check_count("steps", steps)
        epochs = None if epochs is None else check_count("epochs", epochs)
        first = _iterator_of(data, epochs)
        if resume_data not in ("fast_forward", "refuse", "restart"):
            raise ValueError(f"resume_data={resume_data!r}: it must be 'fast_forward', 'refuse' or 'restart'.")
        start = None if resume_data == "restart" else position
        self._data, self._iterator, self._steps = data, first, steps
        self._epochs = epochs if epochs is not None or steps is not None else 1
        self._start, self._display = start, display or Display(False)
        self._how: ResumeData = resume_data
        self._remainder = remainder
        self.left_out = 0  # the number of batches of a pass that `remainder` leaves out
        if remainder is not None:
            begin = 0 if start is None else start.in_epoch
            length = _length(data) if isinstance(data, Sequence) else None
            once = steps is not None and length is not None and begin + steps <= length
            self.left_out = remainder.left_out(data, begin if once else 0, begin + steps if once and steps else None)
        self._has_told = False
        self.given = 0
        self._taken = 0  # counts the batches that are left out too
        self._before = start.batches if start is not None else 0
        self._epoch = start.epoch if start is not None else 0
        # Without an iterator that keeps the order, it may change from run to run: a program may shuffle a list too.
        self._hashes = not hasattr(first, "get_state")
        self._drawn = drawn or Drawn(hashes=self._hashes)  # in the current pass
        self._position = self._position_before = start or self._here()
        self._run = self._generate()

    def __next__(self) -> Any:
        with process_group().waiting("the next batch of the data"):
            return next(self._run)

    def steps_left(self) -> int | None:
        """Return the number of batches that will be given, if that is known before the first one."""
        length = _length(self._data)
        if length is None:
            return self._steps
        whole = (length - self.left_out) * (self._epochs or 1) - (self._before - self._epoch * self.left_out)
        if self._steps is None:
            return whole
        return self._steps if self._epochs is None else min(self._steps, whole)

    def position(self) -> DataPosition:
        """Return the position after all given batches."""
        return self._position

    def position_after(self, used: int) -> DataPosition | None:
        """Return the position after `used` batches, if these are all given batches, or all but the last; else None."""
        return {self.given - 1: self._position_before, self.given: self._position}.get(used)

    def drawn_from(self, data: Any) -> Drawn | None:
        """Return the batches drawn from `data`, if these batches came from this very iterator; else None."""
        return self._drawn if data is self._iterator else None

    def _here(self) -> DataPosition:
        """Return the position between two draws. If a draw is interrupted, the iterator may have moved on."""
        return DataPosition(
            batches=self._before + self._taken,
            epoch=self._epoch,
            in_epoch=self._drawn.batches,
            examples=self._drawn.examples,
            batch_size=self._drawn.batch_size if self._drawn.batches else None,
            iterator=state_of(self._iterator),
            order=self._drawn.order,
        )

    def _generate(self) -> Iterator[Any]:
        once = self._iterator is self._data
        if self._epochs is not None and self._epoch >= self._epochs:
            self._display.message(f"nothing to do: {self._epochs} of {self._epochs} passes over the data are done")
            return
        if self._start is not None:
            self._iterator = seek_pass(self._data, self._iterator, self._start, self._how, self._display)
            seek(self._data, self._iterator, self._start, self._how, self._display, self._drawn)
            if self._start.epoch:
                self._tell_later_passes()
        while True:
            for drawn in self._iterator:
                self._drawn.add(drawn)
                if self._start is not None and not self._taken:
                    check_batch_size(self._iterator, self._start, drawn, self._drawn)
                self._taken += 1
                batch = drawn if self._remainder is None else self._remainder.fitted(drawn, self._drawn.batch_size)
                if batch is None:
                    continue
                self.given += 1
                self._position_before, self._position = self._position, self._here()
                yield batch
                if self.given == self._steps:
                    return
            used = self._before + self._taken + (0 if self._start is None else self._start.in_epoch)
            if not used:
                raise ValueError(f"data ({named(self._data)}) held no batch.")
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return
            if once or not self._drawn.batches:
                warn_user(
                    f"data ended after {self.given} of {self._steps} steps: {named(self._data)} runs once. "
                    "Training stops here.",
                    UserWarning,
                )
                return
            self._epoch, self._drawn = self._epoch + 1, Drawn(batch_size=self._drawn.batch_size, hashes=self._hashes)
            self._iterator = iter(self._data)
            self._position = self._here()
            self._tell_later_passes()

    def _tell_later_passes(self) -> None:
        """Tell once that a resumed run may order its later passes otherwise: it did not draw what was drawn before."""
        if self._start is not None and not self._has_told and has_own_state(self._iterator, self._start):
            self._has_told = True
            self._display.message(
                f"pass {self._epoch + 1} over the data ({named(self._data)}): the iterator's state was restored, but "
                "earlier passes were not drawn again. If the order of a pass depends on them, an uninterrupted run "
                "would draw another one. Let each pass depend on a seed and its number only."
            )


def _length(data: Any) -> int | None:
    """Return the number of batches in a pass, if `data` knows it."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except Exception:  # such as torch's DataLoader over an IterableDataset without a length
        return None


def _iterator_of(data: Iterable[Any], epochs: int | None) -> Iterator[Any]:
    """Return an iterator over `data`, after checks of the arguments."""
    check_batches("data", data)
    first = iter(data)
    if first is data and epochs is not None and epochs > 1:
        raise ValueError(
            f"epochs={epochs} needs data that can be iterated again, but a {type(data).__name__} runs once. Pass a "
            "list or an object whose __iter__ starts from the beginning, or give `steps` instead."
        )
    return first


def check_batches(name: str, data: Any) -> None:
    """Refuse one batch, and what cannot be iterated, where an iterable of batches is due: raise a `TypeError`.

    The rows of an array, or the keys of a mapping, would be taken for batches.
    """
    if isinstance(data, Mapping):
        raise TypeError(
            f"{name} is a {type(data).__name__} of {', '.join(map(repr, data))}: one batch? Pass an iterable of "
            "batches: `[batch]`."
        )
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        raise TypeError(
            f"{name} is an array ({type(data).__name__}) of shape {tuple(data.shape)}: one batch? Pass an iterable of "
            "batches: `[batch]`; or `list(array)`, if each row is a batch."
        )
    if hasattr(data, "__array__") or isinstance(data, (str, bytes)):  # a table, or a path
        raise TypeError(
            f"{name} is a {type(data).__name__}, not an iterable of batches. Pass batches of arrays: "
            "`[{column: np.asarray(table[column]) for column in columns}]` for a table in one batch."
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"{name} is a {type(data).__name__}, which cannot be iterated. Pass an iterable of batches: a list, a "
            "generator, a grain dataset or loader."
        )


def awaited(data: Iterable[Any], what: str) -> Iterator[Any]:
    """Iterate over `data`; if an item takes long, print that the process waits for `what`."""
    iterator, end = iter(data), object()
    while True:
        with process_group().waiting(what):
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch


class DataTracking:
    """Tracks the position in the data that belongs to the step in memory, `step()`, for checkpoints."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._source: Batches | None = None
        self._last_source: Batches | None = None  # the source of the last loop; a restore does not change it
        self._source_begin = 0
        self._position: tuple[int, DataPosition] | None = None  # a step, and the position after it

    def enter(self, source: Batches) -> Batches:
        """Note that batches come from `source` from now on."""
        self._source = self._last_source = source
        self._source_begin, self._position = self._step(), None
        return source

    @property
    def is_running(self) -> bool:
        """True while a loop draws batches."""
        return self._source is not None

    def leave(self, source: Batches) -> None:
        """Note that batches do not come from `source` any more: later steps do not belong to `source`."""
        if self._source is source:
            position = self.position()
            self._source, self._position = None, None if position is None else (self._step(), position)

    def drawn_from(self, data: Any) -> Drawn | None:
        """Return the batches that the last loop has drawn from `data`, if `data` is the same iterator; else None."""
        return None if self._last_source is None else self._last_source.drawn_from(data)

    def restored(self, position: DataPosition | None, *, before: int) -> None:
        """Note that the step in memory comes from a checkpoint with this position in the data.

        The data of a loop does not go back: its next step uses the next batch. `before` is the step before the restore.
        """
        self._source_begin += self._step() - before
        self._position = None if position is None else (self._step(), position)

    def position(self) -> DataPosition | None:
        """Return the position in the data after the step in memory, if known."""
        at_step, position = self._position or (None, None)
        if at_step == self._step():
            return position
        if self._source is None:
            return None
        # If the user took steps with other batches, there is no position. A drawn batch may wait for its step.
        return self._source.position_after(self._step() - self._source_begin)
