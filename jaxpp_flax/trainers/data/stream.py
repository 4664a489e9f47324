"""The stream of batches: from any iterable of pytrees of arrays, in one pass or several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, overload

from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.data.position import (
    DataPosition,
    Drawn,
    ResumeData,
    check_batch_size,
    examples_in,
    has_own_state,
    seek,
    state_of,
)
from jaxpp_flax.trainers.data.remainder import RemainderRule
from jaxpp_flax.trainers.loop.progress import Meter

__all__ = ["Batches", "awaited", "batches"]


def batches(
    data: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    position: DataPosition | None = None,
    resume_data: ResumeData = "fast_forward",
    meter: Meter | None = None,
    drawn: Drawn | Literal[0] = 0,
    remainder: RemainderRule | None = None,
) -> Batches:
    """Iterate over the batches of `data`: at most `steps` batches, in at most `epochs` passes.

    Without `steps` and `epochs`: one pass. With `steps` alone, a list or dataset is repeated as needed; a generator
    ends when it has no more batches.

    Args:
      data: an iterable of batches.
      steps: the maximum number of batches, without the batches before `position`.
      epochs: the maximum number of passes, with the passes before `position`.
      position: the position to begin at; see `jaxpp_flax.trainers.data.position`.
      resume_data: how to reach the position if `data` has no `set_state`.
      meter: shows the progress towards the position.
      drawn: from `Batches.drawn_from`, if `data` is an iterator that has been used before; else 0.
      remainder: the rule for smaller batches; None: smaller batches are not changed.

    Raises:
      BatchError: if `remainder` refuses a batch of a list.
      ValueError: if `steps` or `epochs` is below 1, `data` is empty, or `data` is a generator and `epochs` above 1.
      TypeError: if `data` cannot be iterated.

    Example:
      >>> list(batches([1, 2, 3], steps=5)), list(batches([1, 2], epochs=2))
      ([1, 2, 3, 1, 2], [1, 2, 1, 2])
    """
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1.")
    try:
        first = iter(data)
    except TypeError as error:
        raise TypeError(
            f"data is a {type(data).__name__}, which cannot be iterated. Pass an iterable of batches: a list, a "
            "generator, a grain dataset or loader."
        ) from error
    if isinstance(data, dict):
        raise TypeError("data is a dict: a single batch? Pass an iterable of batches, e.g. `[batch]`.")
    if first is data and epochs is not None and epochs > 1:
        raise ValueError(
            f"epochs={epochs} needs data that can be iterated again, but a {type(data).__name__} runs once. Pass a "
            "list or an object whose __iter__ starts anew, or give `steps` instead."
        )
    if resume_data not in ("fast_forward", "refuse", "restart"):
        raise ValueError(f"resume_data={resume_data!r}: it must be 'fast_forward', 'refuse' or 'restart'.")
    passes = epochs if epochs is not None or steps is not None else 1
    start = None if resume_data == "restart" else position
    left_out = 0
    if remainder is not None:
        begin = 0 if start is None else start.in_epoch
        once = steps is not None and isinstance(data, Sequence) and begin + steps <= len(data)
        left_out = remainder.left_out(data, begin if once else 0, begin + steps if once and steps else None)
    return Batches(data, first, steps, passes, start, resume_data, meter, drawn or Drawn(), remainder, left_out)


class Batches(Iterator[Any]):
    """An iterator over batches that knows its position; `batches` makes it.

    Example:
      >>> source = batches([5, 6, 7], steps=5)
      >>> [next(source) for _ in range(4)], source.position().epoch, source.position().in_epoch
      ([5, 6, 7, 5], 1, 1)
      >>> list(batches([5, 6, 7], steps=1, position=source.position()))
      [6]
      >>> list(batches([5, 6, 7], steps=1, position=source.position(used=3)))
      [5]
    """

    def __init__(
        self,
        data: Iterable[Any],
        first: Iterator[Any],
        steps: int | None,
        epochs: int | None,
        position: DataPosition | None,
        resume_data: ResumeData,
        meter: Meter | None,
        drawn: Drawn,
        remainder: RemainderRule | None,
        left_out: int,
    ) -> None:
        self._data, self._iterator, self._steps, self._epochs = data, first, steps, epochs
        self._start, self._meter = position, meter or Meter()
        self._how: ResumeData = resume_data
        self._remainder, self.left_out = remainder, left_out  # `left_out` counts the batches of a pass
        self.given = 0
        self._taken = 0  # counts the batches that are left out too
        self._full = position.batch_size if position is not None and position.in_epoch else None
        self._before = position.batches if position is not None else 0
        self._epoch = position.epoch if position is not None else 0
        self._drawn = drawn  # in the current pass
        # The size of the first batch given in the pass. An iterator's own state counts batches of this size.
        self._batch_size = position.batch_size if position is not None and has_own_state(first, position) else None
        self._position = self._position_before = position or self._here()
        self._run = self._generate()

    def __next__(self) -> Any:
        with process_group().waiting("the next batch of the data"):
            return next(self._run)

    @overload
    def position(self) -> DataPosition: ...

    @overload
    def position(self, used: int) -> DataPosition | None: ...

    def position(self, used: int | None = None) -> DataPosition | None:
        """Return the position after `used` batches, if these are all given batches, or all but the last; else None."""
        if used is None or used == self.given:
            return self._position
        return self._position_before if used == self.given - 1 else None

    def drawn_from(self, data: Any) -> Drawn | Literal[0]:
        """Return the batches drawn from `data`, if `data` is the same iterator that these batches came from; else 0."""
        return self._drawn if data is self._iterator else 0

    def _here(self) -> DataPosition:
        """Return the position between two draws. If a draw is interrupted, the iterator may have moved on."""
        return DataPosition(
            batches=self._before + self._taken,
            epoch=self._epoch,
            in_epoch=self._drawn.batches,
            examples=self._drawn.examples,
            batch_size=self._batch_size,
            iterator=state_of(self._iterator),
        )

    def _generate(self) -> Iterator[Any]:
        once = self._iterator is self._data
        if self._epochs is not None and self._epoch >= self._epochs:
            self._meter.message(f"nothing to do: {self._epochs} of {self._epochs} passes over the data are done")
            return
        if self._start is not None:
            seek(self._iterator, self._start, self._how, self._meter, self._drawn)
        while True:
            for drawn in self._iterator:
                self._drawn.add(drawn)
                if self._start is not None and not self._taken:
                    check_batch_size(self._iterator, self._start, drawn)
                batch = self._take(drawn)
                if batch is None:
                    continue
                self.given += 1
                self._position_before, self._position = self._position, self._here()
                yield batch
                if self.given == self._steps:
                    return
            if not self._before + self._taken:
                raise ValueError(f"data (a {type(self._data).__name__}) held no batch.")
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return
            if once or not self._drawn.batches:
                warnings.warn(
                    f"data ended after {self.given} of {self._steps} steps: a {type(self._data).__name__} runs once. "
                    "Training stops here.",
                    UserWarning,
                    stacklevel=4,
                )
                return
            self._epoch, self._batch_size, self._full, self._drawn = self._epoch + 1, None, None, Drawn()
            self._iterator = iter(self._data)
            self._position = self._here()

    def _take(self, drawn: Any) -> Any:
        """Return the batch to train on, or None."""
        batch = drawn if self._remainder is None else self._remainder.fitted(drawn, self._full)
        self._taken += 1
        if self._full is None or self._taken == 1:  # in a resumed run, batches may have another size now
            self._full = None if batch is None else examples_in(drawn)
        if self._batch_size is None and batch is not None:
            self._batch_size = examples_in(drawn)
        return batch


def awaited(data: Iterable[Any], what: str) -> Iterator[Any]:
    """Iterate over `data`; if an item takes long, print that the process waits for `what`.

    Example:
      >>> list(awaited([1, 2], "the next batch of eval_data"))
      [1, 2]
    """
    iterator, end = iter(data), object()
    while True:
        with process_group().waiting(what):
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch
