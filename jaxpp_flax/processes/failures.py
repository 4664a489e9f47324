"""How a process learns that another one has failed: by heartbeats, by reports in the store, by a broken connection.

A process that fails takes others with it: their connections break, and the values that they send on are errors too.
Each process repeats the first report of a run. So a process that was only hit waits for the report of the one that
failed, before it names a process itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxpp_flax.processes.barriers import Barriers
from jaxpp_flax.processes.store import ROOT, KeyValueStore
from jaxpp_flax.processes.waits import Waits, name_processes, reporting_thread

__all__ = [
    "DEFAULT_FAILURE_TIMEOUT",
    "PEER_FAILED_STATUS",
    "PREEMPTED_STATUS",
    "Failure",
    "Watch",
    "WatchedGroup",
    "await_report",
    "may_come_from_a_peer",
    "observe_broken_connection",
]

DEFAULT_FAILURE_TIMEOUT = 30.0
"""Seconds within which every process has ended after one of them was killed, stopped, or failed."""

PEER_FAILED_STATUS = 69
"""Exit status of a process that ends because another one failed."""

PREEMPTED_STATUS = 75
"""Exit status after SIGTERM, once the checkpoint is complete: start the program again and it goes on from there."""

# Shares of the failure timeout: the silence after which a process counts as lost, and then the time that the main
# thread has to end by itself.
_SILENCE_SHARE = 0.6
_GRACE_SHARE = 0.1
# A state counts as news once a process has told it in so many heartbeats.
_HEARTBEATS = 2


@dataclass(frozen=True)
class Failure:
    """Why the run cannot go on.

    Attributes:
      process: index of the process that failed, or None if it is unknown.
      message: the process's end in words, such as an exception's type and message.
    """

    process: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.process is None else f"process {self.process}: {self.message}"


class WatchedGroup(Protocol):
    """The parts of a `ProcessGroup` that this file uses."""

    process_index: int
    process_count: int
    failed: threading.Event
    failure: Failure | None
    service: str
    runs: int
    waits: Waits
    barriers: Barriers

    def observe(self, failure: Failure, *, tell: bool = False) -> None: ...

    def was_heard(self, process: int, within_s: float) -> bool: ...


# -- heartbeats


class Watch:
    """Two threads: one exchanges heartbeats through the store, and may hang with it; the other judges, and never waits.

    Args:
      group, store: all processes, and what they share.
      timeout_s: seconds within which a failure anywhere has ended every process.
      on_failure: called with a failure that this process has not ended by in time.
    """

    def __init__(
        self,
        group: WatchedGroup,
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
        # Each process's last heartbeat, and when it came. Other threads read the mapping: replace it, never change it.
        self._beats: Mapping[int, tuple[bytes, float]] = {}
        self._beats_change = threading.Lock()
        # For each process awaited in vain, its state and our barrier: since when, and at which of its heartbeats.
        self._vain_since: dict[tuple[int, bytes, str | None], tuple[float, int]] = {}
        self._peers = [index for index in range(group.process_count) if index != group.process_index]
        self._threads = [
            reporting_thread(f"jaxpp_flax {name}", target, self._report)
            for name, target in [("heartbeat", self._beat), ("watch", self._judge)]
        ]
        for thread in self._threads:
            thread.start()

    def _report(self, failure: str) -> None:
        """Report that a thread of the watch has failed: without it no process would hear of another one's end."""
        self._group.observe(Failure(self._group.process_index, failure), tell=True)
        if threading.current_thread() is self._threads[1] and not self._ended.wait(self._grace):
            self._on_failure(self._group.failure or Failure(self._group.process_index, failure))

    def was_heard(self, process: int, within_s: float) -> bool:
        """Whether a new heartbeat of a process has come within the last seconds."""
        beat = self._beats.get(process)
        return beat is not None and time.monotonic() - beat[1] <= within_s

    def stop(self) -> None:
        """End both threads."""
        self._ended.set()
        for thread in self._threads:
            # A short wait: a thread may hang in a call to a store that is gone, and ends with the process.
            thread.join(timeout=1.0)

    def _beat(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            try:
                self._store.set(f"{ROOT}/beats/{self._group.process_index}", f"{number} {self._state()}".encode())
                beats, failures = self._store.list(f"{ROOT}/beats"), self._store.list(f"{ROOT}/failures")
            except Exception:
                # Either the service is gone, and `_judge` notices its silence; or one call failed.
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
                # This process itself stood still, so the missing heartbeats say nothing about the others.
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
        # A process without any heartbeat is still starting; the barrier after the start has its own deadline.
        beats = self._beats
        silent = [index for index, (_, heard) in sorted(beats.items()) if now - heard > self._silence]
        # While the service itself is silent, no heartbeat can come.
        if silent and now - self._answered < self._silence / 2:
            return Failure(
                silent[0],
                f"no sign of life for {now - beats[silent[0]][1]:.0f} s: it was killed, was stopped, or its host "
                "is down" + (f" (so for {name_processes(silent)})" if len(silent) > 1 else ""),
            )
        return self._ended_too_early(now)

    def _state(self) -> str:
        """The state of this process, as its heartbeats tell it."""
        if self.finished:
            return "finished"
        if self._group.barriers.idle_reason is not None:
            return f"idle {self._group.runs}: {self._group.barriers.idle_reason}"
        current = self._group.barriers.current
        return "running" if current is None else f"barrier {self._group.runs}: {current}"

    def _ended_too_early(self, now: float) -> Failure | None:
        """The failure of a process that this one waits for in vain: it has ended its program, or goes no further."""
        mine, before = self._group.barriers.current, self._vain_since
        self._vain_since = {}
        for on, run in self._group.waits.awaited_processes():
            number, _, state = self._beats.get(on, (b"0", 0.0))[0].partition(b" ")
            why, patience = self._why_in_vain(state, mine, run)
            if why is None:
                continue
            key = (on, state, mine)
            since, beat = self._vain_since[key] = before.get(key, (now, int(number)))
            # The process must have told this state repeatedly, however slow this machine or the store is.
            if now - since > patience and int(number) >= beat + _HEARTBEATS:
                # The waits go into the message: the process that failed prints it too, and does not know them.
                waits = "; and for ".join(self._group.waits.texts())
                return Failure(on, f"{why} Process {self._group.process_index} waits for {waits}.")
        return None

    def _why_in_vain(self, state: bytes, mine: str | None, run: int | None) -> tuple[str | None, float]:
        """Why it is vain to wait for a process in this state (None: it is not), and the seconds until that is certain.

        This process is at barrier `mine`, or awaits a value of the run with number `run`.
        """
        kind, _, text = state.decode(errors="replace").partition(": ")
        kind, _, last_run = kind.partition(" ")
        soon = 2 * self._interval + 1.0  # the value that it sent last may still be on its way
        if kind == "finished":
            why = (
                "it ended its program while others wait for it; did its data end earlier, or does it take another "
                "branch than they do?"
            )
            return why, soon
        if self.finished:  # this process ended too early; the other one is the first to say so
            soon = self._silence
        if kind == "idle":
            # A large value of a run that it took part in may be on its way for long.
            never = mine is not None or (run is not None and last_run.isdigit() and run > int(last_run))
            return f"it goes no further while others wait for it: {text}.", soon if never else self._silence
        if kind == "barrier" and mine not in (None, text):
            why = (
                f"it waits for all processes at {text!r}, while process {self._group.process_index} does so at "
                f"{mine!r}: every process must make the same calls in the same order."
            )
            return why, soon
        if kind == "barrier" and mine is None and run is not None and last_run.isdigit() and run > int(last_run):
            why = (
                f"it waits for all processes at {text!r}, while process {self._group.process_index} runs a program "
                "that it has not begun: every process must make the same calls in the same order, with arguments of "
                "the same types and shardings."
            )
            return why, soon
        return None, 0.0


def _first_failure(failures: Mapping[str, bytes]) -> Failure:
    """The failure to repeat: one that a process reports of itself comes before those that others report of it."""
    parsed: list[tuple[bool, str, Failure]] = []
    for reporter, value in failures.items():
        process, _, message = value.decode(errors="replace").partition("\n")
        parsed.append((process != reporter, reporter, Failure(int(process) if process else None, message)))
    return min(parsed, key=lambda entry: entry[:2])[2]


# -- errors of JAX that another process's failure has caused

# Words in errors of JAX that another process's death may cause: wait for the news of it.
_WORDS = (
    "unavailable", "connect", "socket", "peer", "gloo", "poison", "aborted", "cancelled", "transferring", "recv",
    "broken pipe",
)  # fmt: skip

# A process that fails by itself reports it before its connections break; the others read reports each second.
_REPORT_SECONDS = 2.0
# A process that still lives was hit itself, and waits for a report before it makes one.
_LIVES_SECONDS = 10.0
# Heartbeats come each second. A process whose last one is older than this counts as dead here.
_SILENT_SECONDS = 2.5
_POLL_SECONDS = 0.05


def may_come_from_a_peer(error: BaseException) -> bool:
    """Whether another process's death may have caused an error of JAX.

    >>> may_come_from_a_peer(RuntimeError("INTERNAL: SocketServer: Connection closed"))
    True
    >>> may_come_from_a_peer(RuntimeError("recv() failed errno: 107 err: Transport endpoint is not connected"))
    True
    >>> may_come_from_a_peer(ValueError("shape"))
    False
    """
    text = str(error).lower()
    return any(word in text for word in _WORDS)


def await_report(group: WatchedGroup, process: int | None) -> None:
    """Wait until a report says which process failed; at most ten seconds.

    A value that `process` has sent has become an error; None if the sender is unknown.
    """
    begun = time.monotonic()
    while group.process_count > 1 and not group.failed.wait(_POLL_SECONDS):
        lives = process is None or group.was_heard(process, _SILENT_SECONDS)
        if time.monotonic() - begun > (_LIVES_SECONDS if lives else _REPORT_SECONDS):
            return


def observe_broken_connection(group: WatchedGroup, process: int, what: str, error: BaseException) -> None:
    """Record that the connection to process `process` broke, unless a report names the process that failed first."""
    await_report(group, process)
    group.observe(
        Failure(
            process,
            f"its connection broke while process {group.process_index} waited for {what}: it was killed, or ended its "
            f"program early ({str(error).splitlines()[0]}). Look for the reason at the end of the output of process "
            f"{process}, then start the run again, from its last checkpoint.",
        ),
        tell=True,
    )
