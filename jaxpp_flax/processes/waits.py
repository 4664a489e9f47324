"""What the threads of a process wait for, and since when; said aloud where it takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jaxpp_flax.processes.watch import name_processes, reporting_thread

__all__ = ["REPORT_SECONDS", "Reporter", "Wait", "Waits", "quietly", "say"]

REPORT_SECONDS = 60.0
"""After so long a wait is reported, and again each time that it has doubled."""

_POLL_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Wait:
    """One wait of one thread.

    Attributes:
      what: is waited for, in words.
      on: the processes that are waited for, where they are known.
      run: the number of the program's run that what is awaited belongs to, as `ProcessGroup.runs` counts them.
      since: when it began.
    """

    what: Callable[[], str]
    on: tuple[int, ...]
    run: int | None
    since: float

    def __str__(self) -> str:
        return f"{self.what()} (from {name_processes([*self.on])})" if self.on else self.what()


class Waits:
    """Those of the threads of a process; any thread may read while others begin and end.

    Example:
      >>> waits = Waits()
      >>> with waits.waiting("the save of step 40"), waits.waiting(lambda: "where the data stands", on=1):
      ...     waits.texts()
      ['the save of step 40: where the data stands (from process 1)']
    """

    def __init__(self) -> None:
        self._of_threads: dict[int, Wait] = {}

    @contextmanager
    def waiting(self, what: str | Callable[[], str], on: int | None = None, run: int | None = None) -> Generator[None]:
        """Say what this thread waits for inside the block; see `ProcessGroup.waiting`."""
        thread = threading.get_ident()
        before = self._of_threads.get(thread)
        say = what if callable(what) else lambda: what
        said = say if before is None else lambda: f"{before.what()}: {say()}"
        self._of_threads[thread] = Wait(said, () if on is None else (on,), run, time.monotonic())
        try:
            yield
        finally:
            if before is None:
                del self._of_threads[thread]
            else:
                self._of_threads[thread] = before

    def on(self, processes: list[int]) -> None:
        """Say for which processes this thread waits, where it does not wait for one that it knows from the start."""
        thread = threading.get_ident()
        self._of_threads[thread] = replace(self._of_threads[thread], on=tuple(processes))

    def now(self) -> list[Wait]:
        """All of them at the moment: a copy, in one go."""
        return list(self._of_threads.copy().values())

    def texts(self) -> list[str]:
        """All of them in words; two threads may wait for the same."""
        return list(dict.fromkeys(map(str, self.now())))


class Reporter:
    """Says on stderr what is waited for, when that takes long; in a background thread, which may stand still there.

    Args:
      waits: of this process.
      who: it is, such as "process 3".
      after_s: seconds.
    """

    def __init__(self, waits: Waits, who: str, after_s: float = REPORT_SECONDS) -> None:
        self._waits, self._who, self._after = waits, who, after_s
        self._due: dict[float, float] = {}  # for the beginning of a wait, the length at which it is told next
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        reporting_thread("jaxpp_flax reporter", self._run, say).start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(_POLL_SECONDS, self._after / 10)):
            for line in self.lines(time.monotonic()):
                say(line)

    def lines(self, now: float) -> list[str]:
        """What is to be said at a time: of each wait, when it has lasted `after_s`, twice that, four times, ..."""
        waits = self._waits.now()
        self._due = {wait.since: self._due.get(wait.since, self._after) for wait in waits}
        late = {str(wait): wait for wait in waits if now - wait.since >= self._due[wait.since]}
        for wait in late.values():
            while self._due[wait.since] <= now - wait.since:
                self._due[wait.since] *= 2
        return [f"{self._who} has been waiting for {now - wait.since:.0f} s for {text}" for text, wait in late.items()]


def say(line: str) -> None:
    """A line to the user, where there is nobody else to print it."""
    print(f"jaxpp_flax: {line}", file=sys.stderr, flush=True)


def quietly(function: Callable[[], None], timeout_s: float) -> None:
    """Call, but neither fail by it nor be held up for longer: what is called may be the very thing that failed.

    Example:
      >>> quietly(lambda: time.sleep(60.0), timeout_s=0.01)
    """

    def call() -> None:
        try:
            function()
        except Exception:
            return

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(timeout_s)
