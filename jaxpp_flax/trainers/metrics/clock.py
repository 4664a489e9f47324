"""Where the time of a run goes: each moment of the host belongs to one part."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

__all__ = ["Clock", "Part", "timed"]

Part = Literal["data", "dispatch", "device", "save", "evaluation", "compilation", "restore", "placement", "other"]
"""The host waits for a batch; gives a step to the devices; waits for devices that are behind; saves; evaluates;
compiles; restores a checkpoint; makes, reads or moves leaves of the state to their devices; or does something else,
such as callbacks."""

_Taken = ParamSpec("_Taken")
_Returned = TypeVar("_Returned")


class Clock:
    """Adds up the seconds of each part. A part inside another one interrupts it, so that no second counts twice.

    It never waits for a device: two readings of the host's clock for each part.

    Example:
      >>> times = iter([0.0, 1.0, 3.0, 7.0, 8.0])
      >>> clock = Clock(now=lambda: next(times))
      >>> with clock.part("evaluation"):
      ...     with clock.part("compilation"):
      ...         pass
      >>> {part: seconds for part, seconds in clock.seconds.items() if seconds}
      {'evaluation': 3.0, 'compilation': 4.0, 'other': 1.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = dict.fromkeys(get_args(Part), 0.0)
        self._current: Part = "other"
        self._since = now()

    @contextmanager
    def part(self, part: Part) -> Generator[None]:
        """Count the time inside for this part."""
        before = self._current
        self._change(part)
        try:
            yield
        finally:
            self._change(before)

    def each(self, items: Iterable[Any], part: Part) -> Iterator[Any]:
        """Return the items of an iterable; the time of drawing one counts for this part."""
        iterator, end = iter(items), object()
        while True:
            with self.part(part):
                item = next(iterator, end)
            if item is end:
                return
            yield item

    def read(self) -> dict[str, float]:
        """Return the seconds of each part until now."""
        self._change(self._current)
        return dict(self.seconds)

    def _change(self, part: Part) -> None:
        now = self._now()
        self.seconds[self._current] += now - self._since
        self._current, self._since = part, now


def timed(part: Part) -> Callable[[Callable[_Taken, _Returned]], Callable[_Taken, _Returned]]:
    """Count the time of a method for a part of its object's `clock`."""

    def decorate(method: Callable[_Taken, _Returned]) -> Callable[_Taken, _Returned]:
        @functools.wraps(method)
        def run(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Returned:
            clock: Clock = cast(Any, args[0]).clock
            with clock.part(part):
                return method(*args, **kwargs)

        return run

    return decorate
