"""What the heartbeats of all processes say together: which process is lost, awaited in vain, or hangs.

One process alone judges (see `watch`), so one rule holds for all. Nothing here looks at a clock or talks to the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxpp_flax.processes.beats import AwaitedValue, Beat
from jaxpp_flax.processes.failures import Failure
from jaxpp_flax.processes.waits import name_processes

__all__ = ["Judge", "Patience", "end_text", "silence_text"]

# A state counts as news once a process has told it in so many heartbeats.
_HEARTBEATS = 2


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that the judge waits.

    Attributes:
      silence: without a heartbeat, until a process is lost.
      interval: between two heartbeats.
      report: until a process for which others wait is named by all.
      stuck: until the run ends by it.
    """

    silence: float
    interval: float
    report: float
    stuck: float = math.inf

    @property
    def soon(self) -> float:
        """Until what a process sent last has surely arrived."""
        return 2 * self.interval + 1.0


class Judge:
    """Judges the heartbeats of all processes.

    Example:
      >>> judge = Judge(Patience(silence=18.0, interval=1.0, report=60.0))
      >>> for second in range(30):
      ...     judge.hear({0: Beat(number=second), 1: Beat(number=min(second, 5))}, float(second))
      >>> judge.failure(24.5).message.partition(":")[0], judge.failure(24.5).process
      ('no sign of life for 20 s', 1)
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        # Each process's last heartbeat, and when it came first.
        self._beats: dict[int, tuple[Beat, float]] = {}
        # For each process that another one awaits in vain: since when, and at which heartbeats of both.
        self._vain_since: dict[tuple[object, ...], tuple[float, int, int]] = {}

    def hear(self, told: Mapping[int, Beat], now: float) -> None:
        """Take note of all processes' present heartbeats."""
        for index, beat in told.items():
            if index not in self._beats or self._beats[index][0].number != beat.number:
                self._beats[index] = (beat, now)

    def forgive(self, now: float) -> None:
        """Forget all silences: this process itself was stopped, so they say nothing about the others."""
        self._beats = {index: (beat, now) for index, (beat, _) in self._beats.items()}

    def silent(self, now: float, seconds: float) -> dict[int, float]:
        """The processes whose last heartbeat came so long ago, and when; one without any is still starting."""
        return {i: heard for i, (_, heard) in sorted(self._beats.items()) if now - heard > seconds}

    def ended(self, index: int, now: float) -> Failure:
        """The failure of a silent process that is known to have ended."""
        beat, heard = self._beats[index]
        return Failure(index, f"{end_text(now - heard)}. {beat.story()}")

    def failure(self, now: float) -> Failure | None:
        """The failure that the heartbeats show; None while all goes well."""
        return self._lost(now) or self._in_vain(now) or self._stuck_for_too_long()

    def _lost(self, now: float) -> Failure | None:
        silent = self.silent(now, self._patience.silence)
        if not silent:
            return None
        first, heard = next(iter(silent.items()))
        more = f" (so for {name_processes([*silent])})" if len(silent) > 1 else ""
        return Failure(first, f"{silence_text(now - heard)}{more}. {self._beats[first][0].story()}")

    # -- in vain

    def _in_vain(self, now: float) -> Failure | None:
        """The failure of a process that another one waits for in vain: it ended its program, or goes no further."""
        before, self._vain_since = self._vain_since, {}
        for waiter, on, run, text in self._awaited():
            if on not in self._beats or on == waiter:
                continue
            mine, other = self._beats[waiter][0], self._beats[on][0]
            why, patience = _why_in_vain(other, mine, waiter, run, self._patience)
            if why is None:
                continue
            key = (waiter, mine.barrier, text, on, other.finished, other.barrier, other.idle, other.runs)
            since, *numbers = self._vain_since[key] = before.get(key, (now, mine.number, other.number))
            # Both must have told their states repeatedly, however slow this machine or the store is.
            told = min(mine.number - numbers[0], other.number - numbers[1])
            if now - since > patience and told >= _HEARTBEATS:
                return Failure(on, f"{why} Process {waiter} waits for {text}.")
        return None

    def _awaited(self) -> Iterator[tuple[int, int, int | None, str]]:
        """Each wait of a process for another one: both, the run that sends the awaited value, and the wait in words."""
        for waiter, (beat, _) in self._beats.items():
            for wait in beat.waits:
                if wait.on is not None:
                    yield waiter, wait.on, wait.run, wait.what
        for barrier, there in self._barriers().items():
            # One of those who have come speaks for all of them.
            for missing in self._beats.keys() - there:
                yield min(there), missing, None, barrier.rpartition(" (")[0]

    def _barriers(self) -> dict[str, set[int]]:
        """The processes at each barrier."""
        found: dict[str, set[int]] = {}
        for index, (beat, _) in self._beats.items():
            if beat.barrier is not None:
                found.setdefault(beat.barrier, set()).add(index)
        return found

    # -- alive, but stuck

    def stuck(self) -> tuple[int, float, str] | None:
        """The process that the run waits for: its index, for how long it is awaited, and what it last began.

        All processes follow one order of transfers. The sender of the earliest one that is awaited has all that it
        needs: else it would itself wait for an earlier one. So it is the process that does not go on, and those that
        wait for later values wait for it too. If it waits for a value outside of this order, it is not the last in the
        chain.
        """
        waits = [
            (i, wait) for i, (beat, _) in sorted(self._beats.items()) for wait in beat.waits if wait.on is not None
        ]
        sent = [(wait.run or 0, wait.number, i, wait) for i, wait in waits if wait.number is not None]
        also: set[int | None] = set()
        if sent:
            earliest = min((run, number) for run, number, _, _ in sent)
            tied = [(i, wait) for run, number, i, wait in sent if (run, number) == earliest]
            # Of the processes of one rank, the one that began least: the others are in a collective with it.
            waiter, wait = min(tied, key=lambda pair: self._runs_of(pair[1].on))
            also = {w.on for _, w in tied if self._runs_of(w.on)[0] == self._runs_of(wait.on)[0]} - {wait.on}
        elif waits:
            waiter, wait = max(waits, key=lambda pair: pair[1].seconds)
        else:
            return self._missing_at_barrier()
        guilty = self._end_of_chain(wait)
        others = sorted(index for index in also if index is not None) if guilty == wait.on else []
        text = self._told(guilty, f"process {waiter} has waited {wait.seconds:.0f} s for {wait.what}")
        if others:
            text += f" If it is in a collective, {name_processes(others)} may be what it waits for."
        return guilty, wait.seconds, text

    def _runs_of(self, index: int | None) -> tuple[int, float]:
        beat = self._beats[index][0] if index in self._beats else Beat()
        return beat.runs, -beat.seconds

    def _end_of_chain(self, wait: AwaitedValue) -> int:
        on, seen = wait.on, set[int]()
        while on in self._beats and on not in seen:
            seen.add(on)
            further = [w for w in self._beats[on][0].waits if w.on is not None and w.number is None]
            if not further:
                break
            on = further[0].on
        return -1 if on is None else on

    def _missing_at_barrier(self) -> tuple[int, float, str] | None:
        """The first process that has not come to the barrier at which others have waited longest."""
        found: tuple[int, float, str] | None = None
        for barrier, there in self._barriers().items():
            missing = sorted(self._beats.keys() - there)
            seconds = max(self._beats[index][0].came for index in there)
            if missing and (found is None or seconds > found[1]):
                at = barrier.rpartition(" (")[0]
                text = f"{len(there)} of {len(self._beats)} processes have waited {seconds:.0f} s at {at!r}"
                found = missing[0], seconds, self._told(missing[0], text)
        return found

    def _told(self, guilty: int, waits: str) -> str:
        story = self._beats[guilty][0].story() if guilty in self._beats else "It has not begun."
        return f"it lives, but all wait for it: {waits}. {story}"

    def _stuck_for_too_long(self) -> Failure | None:
        if (found := self.stuck()) is None or found[1] < self._patience.stuck:
            return None
        return Failure(
            found[0], f"{found[2]} Raise JAXPP_FLAX_STUCK_TIMEOUT, or leave it out, if the run only needs longer."
        )

    def notice(self) -> tuple[int, float, str] | None:
        """As `stuck`, once all processes are to be told; None before."""
        found = self.stuck()
        return None if found is None or found[1] < self._patience.report else found


def silence_text(seconds: float) -> str:
    """
    >>> silence_text(18.2)
    'no sign of life for 18 s: it was killed, was stopped, or its host is down'
    """
    return f"no sign of life for {seconds:.0f} s: it was killed, was stopped, or its host is down"


def end_text(seconds: float) -> str:
    """
    >>> end_text(4.2)
    'it was killed, or ended without a word: its last sign of life came 4 s ago, and its sockets are closed'
    """
    return (
        f"it was killed, or ended without a word: its last sign of life came {seconds:.0f} s ago, and its sockets are "
        "closed"
    )


def _why_in_vain(other: Beat, mine: Beat, index: int, run: int | None, patience: Patience) -> tuple[str | None, float]:
    """Why process `index` awaits another one in vain (None: it does not), and the seconds until that is certain.

    It awaits a value of the run with this number, or all processes at its barrier.
    """
    if other.finished:
        why = (
            "it ended its program while others wait for it; did its data end earlier, or does it take another "
            "branch than they do?"
        )
        return why, patience.soon
    # If the waiting process ended too early, the other one is the first to say so.
    soon = patience.silence if mine.finished else patience.soon
    is_of_later_run = run is not None and run > other.runs
    if other.idle is not None:
        # A large value of a run that it took part in may be on its way for long.
        never = mine.barrier not in (None, other.barrier) or is_of_later_run
        return f"it goes no further while others wait for it: {other.idle}.", soon if never else patience.silence
    if other.barrier is None or other.barrier == mine.barrier:
        return None, 0.0
    if mine.barrier is not None:
        why = (
            f"it waits for all processes at {other.barrier!r}, while process {index} does so at "
            f"{mine.barrier!r}: every process must make the same calls in the same order."
        )
        return why, soon
    if is_of_later_run:
        why = (
            f"it waits for all processes at {other.barrier!r}, while process {index} runs a program "
            "that it has not begun: every process must make the same calls in the same order, with arguments of "
            "the same types and shardings."
        )
        return why, soon
    return None, 0.0
