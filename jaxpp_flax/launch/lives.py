"""The lives of a run: whether it is started again after a failure, and what the user is told of each life."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpp_flax.launch.host.progress import Progress
from jaxpp_flax.launch.host.signals import exit_status, signal_name
from jaxpp_flax.launch.host.warm import NotForked

__all__ = ["Cause", "Lives"]


@dataclass(frozen=True)
class Cause:
    """Why a life of the run ended before its time.

    Attributes:
      index: of the process that caused it; None if no process did.
      status: the exit status that the launcher has if the run ends by it.
      kind: "end" if somebody asked for the end; "crash" if a process or a host was lost, which may go well next time;
        "error" if a program failed by itself, which it may do each time.
    """

    index: int | None
    message: str
    status: int
    kind: Literal["end", "crash", "error"]

    @classmethod
    def asked(cls, number: int) -> Cause:
        """A signal asks for the end."""
        return cls(None, f"ended by {signal_name(number)}.", 128 + number, "end")

    @classmethod
    def not_forked(cls, error: NotForked) -> Cause:
        """The interpreter that forks is lost."""
        return cls(None, str(error), exit_status(error.status) or 1, "crash" if error.status < 0 else "error")


class Lives:
    """Counts the lives of a run. A life that gets further than all before it counts as the first one.

    Args:
      most: how often the run may be started again without getting further.
      say: tells the user a line.

    Example:
      >>> lives, error = Lives(3, print), Cause(1, "process 1 failed.", 1, "error")
      >>> lives.goes_on(error, reached=7)
      process 1 failed. That was at step 7; restart 1 of 3.
      True
      >>> lives.goes_on(error, reached=7)
      False
    """

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self._most, self._say = most, say
        self._number, self._used, self._furthest = 1, 0, 0
        self._failed_at: float | None = None  # until the life after the failure is told

    def goes_on(self, cause: Cause | None, reached: int) -> bool:
        """Whether another life follows one that has reached this step; then the user is told."""
        further = reached > self._furthest
        self._furthest = max(self._furthest, reached)
        if further:
            self._used = 0
        if cause is None and self._failed_at is not None:  # else `look` has told
            seconds = time.monotonic() - self._failed_at
            self._say(f"life {self._number} ran no steps, and ended well after {seconds:.1f} s.")
        if cause is None or cause.kind == "end" or self._used >= self._most:
            return False
        if cause.kind == "error" and not further:
            return False
        self._number, self._used, self._failed_at = self._number + 1, self._used + 1, time.monotonic()
        where = f"That was at step {reached}" if reached else "That was before the first step"
        self._say(f"{cause.message} {where}; restart {self._used} of {self._most}.")
        return True

    def look(self, pages: Sequence[Progress], *, ended: bool = False) -> None:
        """Tell from where this life goes on, once it has come to its second step, or has ended."""
        if self._failed_at is None:
            return
        first = min((page.first for page in pages if page.first), default=0)
        if not first or (max(page.last for page in pages) == first and not ended):
            return
        seconds, self._failed_at = time.monotonic() - self._failed_at, None
        source = f"from the checkpoint of step {first - 1}" if first > 1 else "from the beginning, without a checkpoint"
        repeated = max(0, self._furthest - first + 1)
        self._say(
            f"life {self._number} goes on {source}: {repeated} step{'' if repeated == 1 else 's'} repeated, "
            f"{'the end' if ended else f'step {first + 1}'} after {seconds:.1f} s."
        )
