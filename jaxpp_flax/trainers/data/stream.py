"""The batches of a loop, from any iterable of pytrees of arrays; and the one position of a trainer in its data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.data.position import BEGINNING, DataPosition
from jaxpp_flax.trainers.data.remainder import RemainderRule
from jaxpp_flax.trainers.data.source import DataSource, ResumeData, named
from jaxpp_flax.trainers.progress import Display

__all__ = ["Batches", "TrainingData", "awaited", "check_batches"]


class Batches(DataSource, Iterator[Any]):
    """The batches of `data`, at most `steps` of them, in at most `epochs` passes; the iterator knows its position.

    Without `steps` and `epochs`: one pass. With `steps` alone, a list or dataset is repeated as needed; a generator
    ends when it has no more batches. Data that cannot be iterated, or iterated again as often as `epochs` asks, are
    refused.

    Args:
      steps: counts without the batches before `position`.
      epochs: counts with the passes before `position`.
      resume_data: how to reach the position if `data` has no state of its own.
      display: shows the progress towards the position.
      at: where `data` stands, if it is an iterator that has been used before.
      remainder: the rule for batches of another size than the first one; None: batches are not changed.

    Example:
      >>> list(Batches([1, 2, 3], steps=5)), list(Batches([1, 2], epochs=2))
      ([1, 2, 3, 1, 2], [1, 2, 1, 2])
      >>> source = Batches([5, 6, 7], steps=5)
      >>> [next(source) for _ in range(4)], source.position.epoch, source.position.in_epoch
      ([5, 6, 7, 5], 1, 1)
      >>> list(Batches([5, 6, 7], steps=1, position=source.position))
      [6]
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
        at: DataPosition | None = None,
        remainder: RemainderRule | None = None,
    ) -> None:
        steps = None if steps is None else check_count("steps", steps)
        epochs = None if epochs is None else check_count("epochs", epochs)
        super().__init__(data, _iterator_of(data, epochs), display or Display.silent(), at or BEGINNING)
        if resume_data not in ("fast_forward", "refuse", "restart"):
            raise ValueError(f"resume_data={resume_data!r}: it must be 'fast_forward', 'refuse' or 'restart'.")
        self.at = replace(self.at, batches=0, epoch=0)
        self.steps = steps
        self._epochs = epochs if epochs is not None or steps is not None else 1
        self._start = None if resume_data == "restart" else position
        self._how: ResumeData = resume_data
        self._remainder = remainder
        self._left_out = 0  # the number of batches of a pass that `remainder` leaves out
        if remainder is not None:
            begin = 0 if self._start is None else self._start.in_epoch
            length = _length(data) if isinstance(data, Sequence) else None
            once = steps is not None and length is not None and begin + steps <= length
            self._left_out = remainder.left_out(data, begin if once else 0, begin + steps if once and steps else None)
        self._has_told = False
        self._given = 0
        self.position = self._start or self.here()
        """The position after all given batches."""
        self.moved: Callable[[DataPosition, bool], None] | None = None
        """Called when the position moves, with the new one, and whether this is by a batch."""
        self._run = self._generate()

    def __next__(self) -> Any:
        with process_group().waiting("the next batch of the data"):
            return next(self._run)

    def close(self) -> None:
        """Give no further batch; a loop that stopped early lets go of the iterator."""
        self._run.close()

    def steps_left(self) -> int | None:
        """Return the number of batches that will be given, if that is known before the first one."""
        length, start = _length(self.data), self._start or BEGINNING
        if length is None:
            return self.steps
        whole = (length - self._left_out) * (self._epochs or 1) - (start.batches - start.epoch * self._left_out)
        if self.steps is None:
            return whole
        return self.steps if self._epochs is None else min(self.steps, whole)

    def _move(self, *, by_batch: bool) -> None:
        self.position = self.here()
        if self.moved is not None:
            self.moved(self.position, by_batch)

    def _generate(self) -> Generator[Any]:
        start, once, is_first = self._start, self.iterator is self.data, True
        if start is not None and self._epochs is not None and start.epoch >= self._epochs:
            self.display.message(f"nothing to do: {self._epochs} of {self._epochs} passes over the data are done")
            return
        if start is not None:
            self.seek(start, self._how)
            if start.epoch:
                self._tell_later_passes()
        while True:
            for batch in self.iterator:
                size = self.note(batch)
                if start is not None and is_first:
                    self.check_batch_size(start, size)
                is_first = False
                if self._remainder is not None and not self._remainder.takes(size, self.at.batch_size):
                    continue
                self._given += 1
                self._move(by_batch=True)
                yield batch
                if self.steps is not None and self._given >= self.steps:  # a restore may have moved the end
                    return
            if not (self.at.batches or (start is not None and start.in_epoch)):
                raise ValueError(f"data ({named(self.data)}) held no batch.")
            if self._epochs is not None and self.at.epoch + 1 >= self._epochs:
                return
            if once or not self.at.in_epoch:
                warn_user(
                    f"data ended after {self._given} of {self.steps} steps: {named(self.data)} runs once. "
                    "Training stops here.",
                    UserWarning,
                )
                return
            self.begin_pass()
            self._move(by_batch=False)
            self._tell_later_passes()

    def _tell_later_passes(self) -> None:
        """Tell once that a resumed run may order its later passes otherwise: it did not draw what was drawn before."""
        if self._start is not None and not self._has_told and self.has_state(self._start):
            self._has_told = True
            self.display.message(
                f"pass {self.at.epoch + 1} over the data ({named(self.data)}): the iterator's state was restored, but "
                "earlier passes were not drawn again. If the order of a pass depends on them, an uninterrupted run "
                "would draw another one. Let each pass depend on a seed and its number only."
            )


class TrainingData:
    """The data of a trainer. It gives each loop its batches, and owns the position that a checkpoint keeps.

    The position belongs to the step in memory. A batch that is drawn at step s moves the position of step s + 1 only.
    A restored checkpoint brings the position of its step. A loop goes on with its next batch even then: the data does
    not go back, and the position after the next step is that of the batch which this step uses.

    Args:
      step: returns the step in memory.
    """

    def __init__(self, step: Callable[[], int], display: Display) -> None:
        self._step, self._display = step, display
        self._known: dict[int, DataPosition] = {}  # of the step in memory, and of the next one if its batch is drawn
        self._running: Batches | None = None
        self._last: Batches | None = None  # of an iterator that another loop may go on with
        self._ends_at_step = False

    @property
    def position(self) -> DataPosition | None:
        """The position in the data after the step in memory; None if that is not known."""
        return self._known.get(self._step())

    @property
    def is_running(self) -> bool:
        """True while a loop draws batches."""
        return self._running is not None

    def batches(self, data: Iterable[Any], *, ends_at_step: bool = False, **options: Any) -> Batches:
        """Return the batches of a loop, with the options of `Batches`; an iterator of the last loop goes on.

        With `ends_at_step`, `steps` counts up to a step of the run: a restore of an earlier one makes the loop longer.
        """
        at = self._last.at if self._last is not None and self._last.iterator is data else None
        batches = Batches(data, display=self._display, at=at, **options)
        self._last = batches if batches.iterator is data else None
        self._ends_at_step = ends_at_step
        return batches

    def begin(self, batches: Batches) -> None:
        """Note that a loop draws these batches from now on."""
        self._running, batches.moved = batches, self._move
        self._only(batches.position)

    def end(self, batches: Batches) -> None:
        """Note that the loop has ended: later steps do not use its batches."""
        batches.moved = None  # else a circle of references would keep the memory of a deleted trainer
        batches.close()
        if self._running is batches:
            self._running = None
            self._only(self.position)

    def restored(self, position: DataPosition | None, *, back: int) -> None:
        """Note that the step in memory comes from a checkpoint with this position, `back` steps before the old one."""
        self._only(position)
        if self._running is not None and self._ends_at_step and self._running.steps is not None:
            self._running.steps += back

    def _only(self, position: DataPosition | None) -> None:
        """Note the position of the step in memory, and no other."""
        self._known = {} if position is None else {self._step(): position}

    def _move(self, position: DataPosition, by_batch: bool) -> None:
        """Note a new position: of the next step if it comes by a batch, else of the step in memory, if known."""
        now = self.position
        self._only(now if by_batch or now is None else position)
        if by_batch:
            self._known[self._step() + 1] = position


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
    if isinstance(data, Microbatches):
        raise TypeError(f"{name} is a Microbatches: one batch? Pass an iterable of batches: `[batch]`.")
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
