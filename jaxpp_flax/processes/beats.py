"""What a process tells of itself once a second, in one entry of the store: its heartbeat."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from jaxpp_flax.processes.barriers import Barriers
from jaxpp_flax.processes.waits import Waits, main_thread_location

__all__ = ["AwaitedValue", "Beat", "Heart", "Teller"]

_MOST_WAITS = 8  # the text of a process with many waiting threads stays short


class Teller(Protocol):
    """The parts of a `ProcessGroup` that a heartbeat tells."""

    runs: int
    begun: Callable[[], str] | None
    door: str
    waits: Waits
    barriers: Barriers


@dataclass(frozen=True)
class AwaitedValue:
    """A `ThreadWait`, for so many seconds; `on` is None unless one process alone is awaited."""

    what: str
    on: int | None = None
    run: int | None = None
    number: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a process.

    Attributes:
      number: counts the heartbeats of the process.
      door: the address of its door (see `doors`); empty if it has none.
      finished: whether its program has ended.
      barrier: the barrier that its main thread is at, which no other barrier's text equals; None if it is at none.
      came: for how long it is at that barrier, in seconds.
      idle: why it sends nothing until all have come to its barrier; None if it goes on.
      runs: how many runs of programs it has begun.
      begun: what it last began, in words.
      seconds: for how long it has begun nothing else.
      place: the line of the user's code that its main thread is at; empty if it has just begun something.
      waits: what its threads wait for.

    Example:
      >>> beat = Beat(number=3, runs=7, waits=(AwaitedValue("gradients", on=1, run=7, number=12),))
      >>> Beat.read(beat.text()) == beat
      True
    """

    number: int = 0
    door: str = ""
    finished: bool = False
    barrier: str | None = None
    came: float = 0.0
    idle: str | None = None
    runs: int = 0
    begun: str = ""
    seconds: float = 0.0
    place: str = ""
    waits: tuple[AwaitedValue, ...] = field(default=())

    def text(self) -> bytes:
        """This heartbeat as an entry of the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes) -> Beat:
        """The heartbeat that an entry of the store tells."""
        fields = json.loads(text)
        return cls(**{**fields, "waits": tuple(AwaitedValue(**wait) for wait in fields.get("waits", ()))})

    def story(self) -> str:
        """What the process last began, since when, and where it is, as a sentence about "it"."""
        began = f"last began {self.begun}, {self.seconds:.0f} s before" if self.begun else "has begun no task"
        waits = "; and for ".join(dict.fromkeys(wait.what for wait in self.waits))
        place = f", and was at {self.place}" if self.place else ""
        return f"It {began}{place}{f', waiting for {waits}' if waits else ''}."


class _Since:
    """For how long a value is what it is, to a heartbeat: so the instruction loop pays for no look at the clock."""

    def __init__(self) -> None:
        self._value: object = None
        self._since: float | None = None

    def seconds(self, value: object, now: float) -> float:
        if self._since is None or value != self._value:
            self._value, self._since = value, now
        return now - self._since


class Heart:
    """Makes the heartbeats of one process."""

    def __init__(self, group: Teller) -> None:
        self.finished = False
        self._group = group
        self._number = 0
        self._begun, self._barrier = _Since(), _Since()

    def beat(self, now: float) -> Beat:
        """The next heartbeat."""
        group = self._group
        self._number += 1
        begun, barrier = group.begun, group.barriers.current
        seconds = self._begun.seconds((group.runs, begun), now)
        return Beat(
            number=self._number,
            door=group.door,
            finished=self.finished,
            barrier=barrier,
            came=self._barrier.seconds(barrier, now),
            idle=group.barriers.idle_reason,
            runs=group.runs,
            begun="" if begun is None else begun(),
            seconds=seconds,
            # To look costs milliseconds of Python's lock: only a process that begins nothing is asked where it is.
            place=main_thread_location() if seconds > 0 else "",
            waits=tuple(
                AwaitedValue(
                    str(wait), wait.on[0] if len(wait.on) == 1 else None, wait.run, wait.number, now - wait.since
                )
                for wait in group.waits.now()[:_MOST_WAITS]
            ),
        )
