"""Data for random trainer scripts, twice: as objects for the trainer, and as what the documentation says of them.

A pass has the examples 0 to 23 in batches of 4 or 8. A list and a dataset can be iterated again; a dataset and an
iterator have `get_state` and `set_state`; a generator has neither.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.trainers.script_program import features_of

EXAMPLES = 24

Kind = Literal["list", "dataset", "generator", "iterator"]
Ending = Literal["raise", "ctrl_c", "sigterm"]


class PlannedError(Exception):
    """The script's own: from its data, or from a callback."""


def happen(what: Ending) -> None:
    """What ends a run, here and now."""
    if what == "raise":
        raise PlannedError
    signal.raise_signal(signal.SIGINT if what == "ctrl_c" else signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set as a script writes it down.

    Args:
      kind: what it can.
      size: the examples of a batch.
      event: what happens within draw number `event[0]` (from 0; drawing for the place counts too), if anything.
    """

    kind: Kind
    size: int
    event: tuple[int, Ending] | None = None

    @property
    def runs_once(self) -> bool:
        return self.kind in ("generator", "iterator")

    @property
    def is_list(self) -> bool:
        return self.kind == "list" and self.event is None

    @property
    def has_state(self) -> bool:
        return self.kind in ("dataset", "iterator")

    def batches(self) -> list[tuple[int, ...]]:
        return [tuple(range(i, i + self.size)) for i in range(0, EXAMPLES, self.size)]

    def build(self) -> Any:
        """For the trainer."""
        if self.is_list:
            return [features_of(examples) for examples in self.batches()]
        source = _Iterable(self)
        return source if not self.runs_once else iter(source)


class _Iterable:
    """Passes over the data that count draws together."""

    def __init__(self, data: Data):
        self.data, self.drawn = data, 0

    def __iter__(self) -> Iterator[Any]:
        if self.data.has_state:
            return _WithState(self)
        return (self.draw(examples) for examples in self.data.batches())

    def draw(self, examples: tuple[int, ...]) -> Any:
        number, self.drawn = self.drawn, self.drawn + 1
        if self.data.event is not None and self.data.event[0] == number:
            happen(self.data.event[1])
        return features_of(examples)


class _WithState:
    """An iterator that moves on before what may go wrong in a draw does."""

    def __init__(self, source: _Iterable):
        self.source, self.at = source, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batches = self.source.data.batches()
        if self.at >= len(batches):
            raise StopIteration
        self.at += 1
        return self.source.draw(batches[self.at - 1])

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


# ---------------------------------------------------------------------- what is documented


class Refused(Exception):  # noqa: N818
    """The place cannot be found in this data: `DataPositionError`."""


class Empty(Exception):  # noqa: N818
    """The data holds no batch: `ValueError`."""


class Happens(Exception):  # noqa: N818
    """An event of the script: args[0] tells which."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run stands: after `examples` of pass number `epoch`, in batches of `size`.

    Args:
      own: whether the data's own state is known, which counts batches of `size`.
    """

    epoch: int = 0
    examples: int = 0
    size: int | None = None
    own: bool = False


class Stream:
    """The examples that a run draws, batch by batch.

    Args:
      data: as above.
      steps, epochs: at most so many; steps count from here, epochs from the beginning of the run.
      start: the place to begin at; None for the beginning.
      how: `resume_data`.
      drawn: batches that the iterator has given before.
    """

    def __init__(
        self, data: Data, *, steps: int | None, epochs: int | None, start: Place | None, how: str, drawn: int = 0
    ):
        self.data, self.steps = data, steps
        self.epochs = 1 if steps is None and epochs is None else epochs
        self.start = None if how == "restart" else start
        self.how = how
        self.place = self.start or Place(examples=drawn * data.size, own=data.has_state)
        self.requested = False  # by SIGTERM
        self.warns = False
        self.given = 0
        self._drawn, self.at, self._sought = drawn, drawn, False

    def next(self) -> tuple[int, ...] | None:
        """The next batch, or None at the end; the place is after it."""
        if self.given == self.steps or (self.epochs is not None and self.place.epoch >= self.epochs):
            return None
        if not self._sought:
            self._sought = True
            self._seek()
        if self.at >= EXAMPLES // self.data.size:
            if not self.given and self.start in (None, Place(own=self.data.has_state)):
                raise Empty
            if self.epochs is not None and self.place.epoch + 1 >= self.epochs:
                return None
            if self.data.runs_once:
                self.warns = True
                return None
            self.at = 0
            self.place = Place(epoch=self.place.epoch + 1)
        examples = self._draw()
        sized = self.start.size if self.start is not None and self.start.own and self.data.has_state else None
        if not self.given and sized is not None and self.data.size != sized:
            if self.data.size < sized and self.at < EXAMPLES // self.data.size:
                self._draw()  # a smaller batch is refused unless none follows it; the iterator goes back
                self.at -= 1
            raise Refused
        self.given += 1
        same_pass = self.start is not None and self.start.epoch == self.place.epoch
        size = sized if sized is not None and same_pass else self.data.size
        own = self.data.has_state
        self.place = Place(epoch=self.place.epoch, examples=examples[-1] + 1, size=size, own=own)
        return examples

    def _seek(self) -> None:
        start = self.start
        if start is None:
            return
        if start.own and self.data.has_state:
            self.at = start.examples // (start.size or 1)
            return
        if start.epoch and not self.data.runs_once and not self.data.is_list:  # each pass may have an order of its own
            if self.how == "refuse":
                raise Refused
            for _ in range(start.epoch * (EXAMPLES // self.data.size)):
                self._draw()
                self.at %= EXAMPLES // self.data.size
        if start.examples != self.at * self.data.size and self.how == "refuse":
            raise Refused
        while self.at * self.data.size < start.examples:
            self._draw()
        if self.at * self.data.size > start.examples:
            raise Refused

    def _draw(self) -> tuple[int, ...]:
        number, self._drawn = self._drawn, self._drawn + 1
        if self.data.event is not None and self.data.event[0] == number:
            if self.data.event[1] != "sigterm":
                raise Happens(self.data.event[1])
            self.requested = True
        self.at += 1
        return self.data.batches()[self.at - 1]
