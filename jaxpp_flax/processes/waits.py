"""The waits of a process: which threads wait for which value, since when, and where the main thread is.

A long wait is reported on stderr. The message of a failure names the waits; if there are none, the main thread's line.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from jaxpp_flax.messages import users_line

__all__ = [
    "MOST_NAMED",
    "REPORT_SECONDS",
    "ThreadWait",
    "WaitReporter",
    "Waits",
    "call_with_limit",
    "flush_output",
    "main_thread_location",
    "name_processes",
    "print_error",
    "print_notice",
    "reporting_thread",
    "seconds_from_environment",
]

REPORT_SECONDS = 60.0
"""A wait is reported after so many seconds, and again each time that its length has doubled."""

_POLL_SECONDS = 1.0
MOST_NAMED = 16
"""The processes that a message names; of the others it gives the number."""


# -- waits


@dataclass(frozen=True, eq=False)
class ThreadWait:
    """One wait of one thread.

    Attributes:
      what: gives the awaited thing in words.
      on: the processes that the thread waits for, where they are known.
      more: how many it waits for beside those.
      run: the number of the program's run that the awaited value comes from, as `ProcessGroup.runs` counts runs.
      number: the place of the awaited value's transfer in the order of that run.
      since: when the wait began.
    """

    what: Callable[[], str]
    on: tuple[int, ...]
    run: int | None
    number: int | None
    since: float
    more: int = 0

    def __str__(self) -> str:
        return f"{self.what()} (from {name_processes([*self.on], self.more)})" if self.on else self.what()


class Waits:
    """The waits of the threads of a process; any thread may read them while others begin and end.

    Example:
      >>> waits = Waits()
      >>> with waits.waiting("the save of step 40"), waits.waiting(lambda: "where the data stands", on=1):
      ...     waits.texts()
      ['the save of step 40: where the data stands (from process 1)']
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, ThreadWait] = {}

    @contextmanager
    def waiting(
        self,
        what: str | Callable[[], str],
        on: int | None = None,
        run: int | None = None,
        number: int | None = None,
    ) -> Generator[None]:
        """Record what this thread waits for inside the block; see `ProcessGroup.waiting`."""
        thread = threading.get_ident()
        outer = self._by_thread.get(thread)
        own = what if callable(what) else lambda: what
        text = own if outer is None else lambda: f"{outer.what()}: {own()}"
        self._by_thread[thread] = ThreadWait(text, () if on is None else (on,), run, number, time.monotonic())
        try:
            yield
        finally:
            if outer is None:
                del self._by_thread[thread]
            else:
                self._by_thread[thread] = outer

    def set_awaited(self, processes: list[int], more: int = 0) -> None:
        """Replace the processes that this thread waits for, where they change during the wait."""
        thread = threading.get_ident()
        self._by_thread[thread] = replace(self._by_thread[thread], on=tuple(processes), more=more)

    def now(self) -> list[ThreadWait]:
        """All waits at the moment: a copy, made in one operation."""
        return list(self._by_thread.copy().values())

    def texts(self) -> list[str]:
        """All waits in words; equal texts of several threads stand there once."""
        return list(dict.fromkeys(map(str, self.now())))


class WaitReporter:
    """Prints waits longer than `after_s` on stderr, from a background thread, since the waiting threads cannot."""

    def __init__(self, waits: Waits, process: str, after_s: float = REPORT_SECONDS) -> None:
        self._waits, self._process, self._after = waits, process, after_s
        self._due: dict[float, float] = {}  # by the time when a wait began: the length at which it is reported next
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the background thread."""
        reporting_thread("jaxpp_flax reporter", self._run, print_notice).start()

    def stop(self) -> None:
        """Let the background thread end."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(_POLL_SECONDS, self._after / 10)):
            for line in self.lines(time.monotonic()):
                print_notice(line)

    def lines(self, now: float) -> list[str]:
        """The reports due at a time: one for each wait that has lasted `after_s`, twice that, four times that, ..."""
        waits = self._waits.now()
        self._due = {wait.since: self._due.get(wait.since, self._after) for wait in waits}
        late = {str(wait): wait for wait in waits if now - wait.since >= self._due[wait.since]}
        for wait in late.values():
            while self._due[wait.since] <= now - wait.since:
                self._due[wait.since] *= 2
        return [
            f"{self._process} has been waiting for {now - wait.since:.0f} s for {text}" for text, wait in late.items()
        ]


# -- the place of the main thread, where no wait is known


def main_thread_location() -> str:
    """The innermost line of the user's code that the main thread is at, and the function that this line calls."""
    # A frame of a thread that runs on is freed memory. So the walk, which takes microseconds, is one turn with Python's
    # lock: it begins with a new turn, of milliseconds, and no collection of garbage gives the lock away. It ends at the
    # user's line and keeps no frame: one that is kept keeps the arrays of a function that has ended meanwhile.
    collects = gc.isenabled()
    gc.disable()
    try:
        time.sleep(0)
        innermost = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
        return users_line(() if innermost is None else traceback.walk_stack(innermost))
    finally:
        if collects:
            gc.enable()


# -- threads and limits of time


def reporting_thread(name: str, target: Callable[[], None], report: Callable[[str], None]) -> threading.Thread:
    """A thread that reports its own error. Otherwise the thread would end unseen, and its work would stay undone.

    >>> thread = reporting_thread("watch", lambda: 1 / 0, lambda failure: print(failure.splitlines()[0]))
    >>> thread.start(), thread.join()
    its thread 'watch' failed: ZeroDivisionError: division by zero
    (None, None)
    """

    def run() -> None:
        try:
            target()
        except Exception as error:
            report(f"its thread {name!r} failed: {type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}")

    return threading.Thread(target=run, name=name, daemon=True)


def call_with_limit(function: Callable[[], None], timeout_s: float) -> None:
    """Call a function, such as a call to a service that may have failed; ignore its error, and wait no longer for it.

    Example:
      >>> call_with_limit(lambda: time.sleep(60.0), timeout_s=0.01)
    """

    def call() -> None:
        try:
            function()
        except Exception:
            return

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(timeout_s)


def seconds_from_environment(environment: Mapping[str, str], name: str, default: float) -> float:
    """The number of seconds in an environment variable, or the default if the variable is not set.

    Raises:
      ValueError: if the variable holds no positive number.

    Example:
      >>> seconds_from_environment({"JAXPP_FLAX_START_TIMEOUT": "5"}, "JAXPP_FLAX_START_TIMEOUT", 1800.0)
      5.0
    """
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{name}={text!r}: it must be a number of seconds above 0.")
    return value


# -- words


def print_error(text: str) -> None:
    """Print on stderr, if it takes that: its reader may have gone, or its disk be full, and a process has to end then.

    A process that an error of its output kept alive would hold its devices, and the other processes.
    """
    with suppress(OSError, ValueError):  # it may be closed
        print(text, file=sys.stderr, flush=True)


def print_notice(line: str) -> None:
    """Print a line to the user on stderr, after the package's name."""
    print_error(f"jaxpp_flax: {line}")


def flush_output() -> None:
    """Write what the process has printed, as far as its output takes that."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def name_processes(indices: list[int], more: int = 0) -> str:
    """The processes in words: "process 1", "processes 1, 3"; of many, the first ones, and how many `more` there are."""
    more += len(indices[MOST_NAMED:])
    named = ", ".join(map(str, indices[:MOST_NAMED]))
    return f"process{'es' if len(indices) + more > 1 else ''} {named}{f' and {more} more' if more else ''}"
