"""The watch over the processes of a run: heartbeats through a key-value store that all of them share.

One thread talks to the store, and may hang with it; the other judges, and never waits for anyone.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "DEFAULT_FAILURE_TIMEOUT",
    "ROOT",
    "Failure",
    "KeyValueStore",
    "Watch",
    "Watched",
    "name_processes",
    "reporting_thread",
]

DEFAULT_FAILURE_TIMEOUT = 30.0
"""Seconds within which every process has ended after one of them was killed, stopped, or failed."""

ROOT = "jaxpp_flax"
"""The folder in the store that belongs to this package."""

# Of the time that a failure may take until every process has ended: silence until a process counts as lost, and then
# the time that the main thread has to end by itself.
_SILENCE_SHARE = 0.6
_GRACE_SHARE = 0.1
# So many heartbeats in which a process has told the same.
_HEARTBEATS = 2


@dataclass(frozen=True)
class Failure:
    """Why the run cannot go on.

    Attributes:
      process: index of the process that failed, or None where that is unknown.
      message: what happened to it, such as an exception's traceback.
    """

    process: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.process is None else f"process {self.process}: {self.message}"


class KeyValueStore(Protocol):
    """The part of a key-value store, shared by all processes, that is needed here. Keys are paths with slashes."""

    def set(self, key: str, value: bytes) -> None:
        """Write an entry, replacing the one that is there."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for an entry; None if it does not come in time."""
        ...

    def list(self, folder: str) -> Mapping[str, bytes]:
        """The entries whose keys begin with `folder` and a slash, by the rest of the key."""
        ...

    def add(self, key: str) -> int:
        """Add one to a counter that begins at zero; returns the sum."""
        ...

    def delete(self, key: str) -> None:
        """Delete an entry, and all entries below it."""
        ...


class Watched(Protocol):
    """What the watch asks of its `ProcessGroup`."""

    process_index: int
    process_count: int
    failed: threading.Event
    idle: str | None
    meeting: str | None
    service: str
    runs: int

    @property
    def failure(self) -> Failure | None: ...

    def observe(self, failure: Failure, *, tell: bool = False) -> None: ...

    def awaited(self) -> list[tuple[int, int | None]]: ...

    def waits(self) -> list[str]: ...


class Watch:
    """The two threads: one talks to the store, and may hang with it; the other judges, and never waits for anyone."""

    def __init__(
        self,
        group: Watched,
        store: KeyValueStore,
        timeout_s: float,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.finished = False
        self._group = group
        self._store = store
        self._silence = timeout_s * _SILENCE_SHARE
        self._grace = timeout_s * _GRACE_SHARE
        self._interval = min(1.0, timeout_s / 20)
        self._on_failure = on_failure
        self._ended = threading.Event()
        now = time.monotonic()
        self._answered = now  # when the store last answered
        # Each process's last heartbeat, and when it came. Never changed but replaced: others read it meanwhile.
        self._beats: Mapping[int, tuple[bytes, float]] = {}
        self._beats_change = threading.Lock()
        # For what is awaited in vain: since when, and at which heartbeat of the process.
        self._lost_since: dict[tuple[int, bytes, str | None], tuple[float, int]] = {}
        self._peers = [index for index in range(group.process_count) if index != group.process_index]
        self._threads = [
            reporting_thread(f"jaxpp_flax {name}", target, self._report)
            for name, target in [("heartbeat", self._beat), ("watch", self._judge)]
        ]
        for thread in self._threads:
            thread.start()

    def _report(self, failure: str) -> None:
        """A thread of these has failed; without it nobody would hear of the end of this process, or of others'."""
        self._group.observe(Failure(self._group.process_index, failure), tell=True)
        if threading.current_thread() is self._threads[1] and not self._ended.wait(self._grace):
            self._on_failure(self._group.failure or Failure(self._group.process_index, failure))

    def was_heard(self, process: int, within_s: float) -> bool:
        """Whether a new heartbeat of a process has come within the last seconds."""
        beat = self._beats.get(process)
        return beat is not None and time.monotonic() - beat[1] <= within_s

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            # Not for long: the store may have gone already, and the threads end with the process.
            thread.join(timeout=1.0)

    def _beat(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            try:
                self._store.set(f"{ROOT}/beats/{self._group.process_index}", f"{number} {self._state()}".encode())
                beats, failures = self._store.list(f"{ROOT}/beats"), self._store.list(f"{ROOT}/failures")
            except Exception:
                # Either the service is gone, which `_judge` finds out by the silence, or a call failed once.
                self._ended.wait(self._interval)
                continue
            now = time.monotonic()
            self._answered = now
            new = {index: (beats[str(index)], now) for index in self._peers if str(index) in beats}
            with self._beats_change:
                before = self._beats
                changed = {index: beat for index, beat in new.items() if beat[0] != before.get(index, (b"", 0.0))[0]}
                self._beats = {**before, **changed}
            if failures and self._group.failure is None:
                self._group.observe(_first_failure(failures))
            self._ended.wait(self._interval)

    def _judge(self) -> None:
        looked = time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if now - looked > self._silence / 3:
                # It was this process that stood still: what it has not heard meanwhile says nothing of the others.
                self._answered = now
                with self._beats_change:
                    self._beats = {index: (beat, now) for index, (beat, _) in self._beats.items()}
            looked = now
            failure = self._group.failure or self._lost()
            if failure is None:
                self._group.failed.wait(self._interval)
                continue
            self._group.observe(failure, tell=True)
            if not self._ended.wait(self._grace):
                self._on_failure(self._group.failure or failure)
            return

    def _lost(self) -> Failure | None:
        now = time.monotonic()
        if now - self._answered > self._silence:
            return Failure(
                None,
                f"{self._group.service} has not answered process {self._group.process_index} for "
                f"{now - self._answered:.0f} s: its host or the network is down, or it was killed or stopped",
            )
        # Who has not begun to write heartbeats is still starting; the barrier after the start has its own deadline.
        beats = self._beats
        silent = [index for index, (_, heard) in sorted(beats.items()) if now - heard > self._silence]
        # Old news says nothing: while the service itself is silent, so is everyone.
        if silent and now - self._answered < self._silence / 2:
            return Failure(
                silent[0],
                f"no sign of life for {now - beats[silent[0]][1]:.0f} s: it was killed, was stopped, or its host "
                "is down" + (f" (so for {name_processes(silent)})" if len(silent) > 1 else ""),
            )
        return self._ended_too_early(now)

    def _state(self) -> str:
        """What this process tells of itself beside that it lives."""
        if self.finished:
            return "finished"
        if self._group.idle is not None:
            return f"idle {self._group.runs}: {self._group.idle}"
        return "running" if self._group.meeting is None else f"meeting: {self._group.meeting}"

    def _ended_too_early(self, now: float) -> Failure | None:
        """A process that another waits for has ended its program, or goes no further: it never will."""
        mine, before = self._group.meeting, self._lost_since
        self._lost_since = {}
        for on, run in self._group.awaited():
            number, _, state = self._beats.get(on, (b"0", 0.0))[0].partition(b" ")
            why, patience = self._why_in_vain(state, mine, run)
            if why is None:
                continue
            key = (on, state, mine)
            since, beat = self._lost_since[key] = before.get(key, (now, int(number)))
            # What the process said of itself must be news, however slow this machine or the store is.
            if now - since > patience and int(number) >= beat + _HEARTBEATS:
                # Told here, since the process that failed does not know it, and may be the one that is heard.
                waits = "; and for ".join(self._group.waits())
                return Failure(on, f"{why} Process {self._group.process_index} waits for {waits}.")
        return None

    def _why_in_vain(self, state: bytes, mine: str | None, run: int | None) -> tuple[str | None, float]:
        """Why a process in this state is waited for in vain, and after how many seconds; None if it may come.

        Args:
          state: what its last heartbeat told.
          mine: the meeting that this process is at.
          run: what is awaited belongs to.
        """
        kind, _, text = state.decode(errors="replace").partition(": ")
        kind, _, last_run = kind.partition(" ")
        soon = 2 * self._interval + 1.0  # what it sent last may still be on its way
        if kind == "finished":
            why = (
                "it ended its program while others wait for it; did its data end earlier, or does it take another "
                "branch than they do?"
            )
            return why, soon
        if self.finished:  # it is this process that has ended too early, and the other one that says so
            soon = self._silence
        if kind == "idle":
            # Of a run that it has taken part in, something large may be on its way for long.
            never = mine is not None or (run is not None and last_run.isdigit() and run > int(last_run))
            return f"it goes no further while others wait for it: {text}.", soon if never else self._silence
        if kind == "meeting" and mine not in (None, text):
            why = (
                f"it waits for all processes at {text!r}, while process {self._group.process_index} does so at "
                f"{mine!r}: every process must make the same calls in the same order."
            )
            return why, soon
        return None, 0.0


def reporting_thread(name: str, target: Callable[[], None], report: Callable[[str], None]) -> threading.Thread:
    """A thread whose own error is told; alone, it would end unseen, and what it watches over would wait for ever.

    Args:
      name: of the thread.
      target: what it runs.
      report: is told its error, once.

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


def _first_failure(failures: Mapping[str, bytes]) -> Failure:
    """The failure to tell of: one that a process reports of itself, before what others say of it."""
    parsed: list[tuple[bool, str, Failure]] = []
    for reporter, value in failures.items():
        process, _, message = value.decode(errors="replace").partition("\n")
        parsed.append((process != reporter, reporter, Failure(int(process) if process else None, message)))
    return min(parsed, key=lambda entry: entry[:2])[2]


def name_processes(indices: list[int]) -> str:
    """The processes in words: "process 1", "processes 1, 3"."""
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
