"""The watch of one process: it tells its heartbeat, hears the news of the run, and judges all if it is the watcher.

Each process writes one entry a second, its heartbeat, and reads one folder, the news: who watches, which failures were
reported, which process hangs. One process, the watcher, reads all heartbeats. So the load on the store grows with
the number of processes, and not with its square. The watcher tells in the news that it watches. If that stops, it is
the one that failed; the first process that notices takes over. Process 0 is the first watcher.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from jaxpp_flax.processes.beats import Beat, Heart, Teller
from jaxpp_flax.processes.doors import Doors, is_closed
from jaxpp_flax.processes.failures import Failure, WatchedGroup, first_failure
from jaxpp_flax.processes.store import ROOT, CoordinationError, KeyValueStore
from jaxpp_flax.processes.verdicts import Judge, Patience, end_text, silence_text
from jaxpp_flax.processes.waits import print_notice, reporting_thread

__all__ = ["FAILURES", "SILENCE_SHARE", "Watch"]

_NEWS = f"{ROOT}/news"
FAILURES = "failures"
"""The folder, inside the news, of what each process reports."""
_STILL = "still"

SILENCE_SHARE = 0.6
"""The share of the failure timeout after which a process without a sign of life counts as lost."""

# The share that its main thread then has to end by itself.
_GRACE_SHARE = 0.1


class _Group(WatchedGroup, Teller, Protocol):
    failure: Failure | None
    service: str
    service_address: str


class Watch:
    """Two threads: one talks to the store, and may hang with it; the other sees the store's silence, and never waits.

    Args:
      group, store: all processes, and what they share.
      timeout_s: seconds within which a failure anywhere has ended every process.
      on_failure: called with a failure that this process has not ended by in time.
      report_s, stuck_s: seconds until a process that lives, but that others wait for, is named; and until the run ends
        by it.
    """

    def __init__(
        self,
        group: _Group,
        store: KeyValueStore,
        timeout_s: float,
        on_failure: Callable[[Failure], None],
        *,
        report_s: float,
        stuck_s: float,
    ) -> None:
        self._group, self._store, self._on_failure = group, store, on_failure
        self._patience = Patience(
            silence=timeout_s * SILENCE_SHARE, interval=min(1.0, timeout_s / 20), report=report_s, stuck=stuck_s
        )
        self._grace = timeout_s * _GRACE_SHARE
        self._heart = Heart(group)
        self._judge: Judge | None = None  # of the watcher
        self._term = 0  # how often the watch has changed hands
        self._news_of_watcher = b""
        self._watcher_heard = self._exchanged = self._answered = time.monotonic()
        self._doors = Doors()
        self._watcher_door = ""
        self._told = 0.0  # for how long a process had stood still when the user was told last
        self._ended = threading.Event()
        self._threads = [
            reporting_thread(f"jaxpp_flax {name}", target, self._report)
            for name, target in [("heartbeat", self._talk), ("watch", self._guard)]
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def _report(self, failure: str) -> None:
        """Report that a thread of the watch has failed: without it no process would hear of another one's end."""
        self._group.observe(Failure(self._group.process_index, failure), tell=True)
        if threading.current_thread() is self._threads[1] and not self._ended.wait(self._grace):
            self._on_failure(self._group.failure or Failure(self._group.process_index, failure))

    def finish(self) -> None:
        """Tell, from now on, that this process has ended its program."""
        self._heart.finished = True

    def has_ended(self, process: int) -> bool:
        """Whether the door of a process is closed. A firewall could do the same: it is no proof."""
        try:
            told = self._store.get(f"{ROOT}/beats/{process}", 0.1)
        except CoordinationError:  # the service may have ended with that process: the watch will say so
            return False
        return told is not None and is_closed(Beat.read(told).door, self._patience.interval) is True

    def stop(self) -> None:
        """End both threads."""
        self._ended.set()
        for thread in self._threads:
            # A short wait: a thread may hang in a call to a store that is gone, and ends with the process.
            thread.join(timeout=1.0)

    # -- the thread that talks to the store

    def _talk(self) -> None:
        while not self._ended.is_set():
            # Either the service is gone, or the connection to it, which JAX makes anew.
            with contextlib.suppress(CoordinationError):
                self.exchange(time.monotonic())
            if time.monotonic() - self._answered > self._patience.interval:
                self._look_for_service()
            self._ended.wait(self._patience.interval)

    def _look_for_service(self) -> None:
        """End the run if the service has ended: without it no process hears of another one."""
        if self._has_closed(self._group.service_address, self._patience.interval, self._answered):
            text = f"{self._group.service} has ended, maybe with all that ran beside it: nothing listens there any more"
            self._group.observe(Failure(None, text))

    def _has_closed(self, door: str, seconds: float, heard: float) -> bool:
        """Whether what listened there has ended; not asked at the end of the program, when all do so."""
        return not self._heart.finished and self._doors.has_closed(door, seconds, heard)

    def exchange(self, now: float) -> None:
        """Tell the heartbeat, and hear the news; called once an interval."""
        beat = self._heart.beat(now)
        self._store.set(f"{ROOT}/beats/{self._group.process_index}", beat.text())
        news = self._store.list(_NEWS)
        if now - self._exchanged > self._patience.silence / 3:
            # This process itself, or the store, stood still, so missing heartbeats say nothing about the others.
            self._watcher_heard = now
            if self._judge is not None:
                self._judge.forgive(now)
        self._exchanged = self._answered = now
        reports = {key.removeprefix(f"{FAILURES}/"): text for key, text in news.items() if key.startswith(FAILURES)}
        if reports and self._group.failure is None:
            self._group.observe(first_failure(reports))
        self._hear_watcher(news.get("watcher", b""), now)
        self._doors.learn([self._group.service_address, self._watcher_door], self._patience.interval / 2)
        if self._judge is None:
            self._name(news.get(_STILL))
        elif self._group.failure is None:  # after a failure, waits are its consequences
            self._judge_all(self._judge, now)

    def _hear_watcher(self, told: bytes, now: float) -> None:
        """Take the watch over if nobody watches, give it up if another process has done so."""
        if told != self._news_of_watcher:
            self._news_of_watcher, self._watcher_heard = told, now
            self._term = max(self._term, int(told.split()[0]))
            self._watcher_door = told.decode().split(" ")[3]
        if self._judge is not None:
            if told and int(told.split()[1]) != self._group.process_index:
                self._judge = None
            return
        silence = now - self._watcher_heard
        first = self._group.process_index == 0 and not told and self._term == 0
        interval = self._patience.interval
        # A door keeps the connection of each that has tried it: so only of those that are silent for longer than usual.
        ended = silence > 1.5 * interval and self._has_closed(self._watcher_door, interval, self._watcher_heard)
        if not first and not ended and silence <= self._patience.silence:
            return
        # If the one that takes over now dies at once, the next term begins after another silence.
        self._term, self._watcher_heard = self._term + 1, now
        own = str(self._group.process_index).encode()
        if self._store.claim(f"{ROOT}/terms/{self._term}", own) != own:
            return
        self._judge = Judge(self._patience)
        self._tell_watch()
        if told:
            text = end_text(silence) if ended else silence_text(silence)
            self._group.observe(Failure(int(told.split()[1]), text), tell=True)

    def _tell_watch(self) -> None:
        group = self._group
        self._news_of_watcher = f"{self._term} {group.process_index} {self._exchanged} {group.door}".encode()
        self._store.set(f"{_NEWS}/watcher", self._news_of_watcher)

    def _judge_all(self, judge: Judge, now: float) -> None:
        self._tell_watch()
        beats = self._store.list(f"{ROOT}/beats")
        told = {int(index): Beat.read(text) for index, text in beats.items()}
        judge.hear(told, now)
        self._doors.learn([beat.door for beat in told.values()], self._patience.interval / 2)
        silent = judge.silent(now, 1.5 * self._patience.interval)
        seconds = self._patience.interval / max(1, len(silent))
        ended = [i for i, heard in silent.items() if self._has_closed(told[i].door, seconds, heard)]
        if (failure := judge.ended(ended[0], now) if ended else judge.failure(now)) is not None:
            self._group.observe(failure, tell=True)
        found = judge.notice()
        if found is not None:
            text = f"{found[0]} {found[1]:.0f} {found[2]}".encode()
            self._store.set(f"{_NEWS}/{_STILL}", text)
            self._name(text)
        elif self._told:
            self._store.delete(f"{_NEWS}/{_STILL}")
            self._name(None)

    def _name(self, told: bytes | None) -> None:
        """Tell the user which process hangs: once, and again each time that its silence has doubled."""
        if told is None:
            self._told = 0.0
            return
        process, seconds, text = told.decode(errors="replace").split(" ", 2)
        if self._told <= float(seconds) < 2 * self._told:
            return
        self._told = float(seconds)
        if int(process) != self._group.process_index:
            print_notice(f"process {process}: {text}")

    # -- the thread that never waits

    def _guard(self) -> None:
        looked = time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if now - looked > self._patience.silence / 3:
                self._answered = now  # this process itself stood still
            looked = now
            failure = self._group.failure or self._silence_of_service(now)
            if failure is None:
                self._group.failed.wait(self._patience.interval)
                continue
            self._group.observe(failure, tell=True)
            if not self._ended.wait(self._grace):
                self._on_failure(self._group.failure or failure)
            return

    def _silence_of_service(self, now: float) -> Failure | None:
        if now - self._answered <= self._patience.silence:
            return None
        return Failure(
            None,
            f"{self._group.service} has not answered process {self._group.process_index} for "
            f"{now - self._answered:.0f} s: its host or the network is down, or it was killed or stopped",
        )
