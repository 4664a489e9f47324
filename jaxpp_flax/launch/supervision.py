"""The supervision of a run: its processes on one host or on several, started, followed and ended together."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import IO, Protocol

from rich.console import Console

from jaxpp_flax.launch.host.host import Host, HostReport
from jaxpp_flax.launch.host.signals import describe_end, exit_status, handled_signals, signal_name
from jaxpp_flax.launch.host.supervised_process import ProcessState
from jaxpp_flax.launch.host.warm import NotForked
from jaxpp_flax.launch.job import LOOPBACK, Job
from jaxpp_flax.launch.lives import Cause, Lives
from jaxpp_flax.launch.logs import Logs
from jaxpp_flax.launch.process.process_end import INTERRUPTED_STATUS
from jaxpp_flax.launch.settings import LaunchSettings, describe_preemption
from jaxpp_flax.processes.failures import PEER_FAILED_STATUS, PREEMPTED_STATUS

__all__ = ["ProcessHost", "run", "supervise"]

_POLL_SECONDS = 0.05
# Python needs a moment to end.
_SECONDS_IN_SILENCE = 10.0


class ProcessHost(Protocol):
    """A host as the supervision sees it: a `Host`, or one that is far away. Its methods are those of `Host`."""

    name: str
    lost: str | None
    address: str

    def serve(self, settings: LaunchSettings) -> None: ...
    def start(self, settings: LaunchSettings) -> None: ...
    def poll(self) -> HostReport: ...
    def tell(self, line: str) -> None: ...
    def signal(self, index: int | None, number: int) -> None: ...
    def end(self) -> None: ...
    def has_ended(self) -> bool: ...


# The exit statuses of a process that ends because of another one, or by its launcher.
_CAUSED_STATUSES = (PEER_FAILED_STATUS, -signal.SIGTERM, -signal.SIGKILL)
# Of one that was asked to end.
_ASKED_STATUSES = (INTERRUPTED_STATUS, -signal.SIGINT, -signal.SIGTERM)
# If all are started again at once, how long the others may still print.
_SECONDS_BEFORE_RESTART = 0.5


def run(job: Job, *, out: IO[str] | None = None, console: Console | None = None) -> int:
    """Run a job on this machine; returns the exit status, as `supervise` does."""
    logs = Logs(job.num_processes, console or Console(stderr=True), out or sys.stdout)
    address = job.address or LOOPBACK
    # Copies of the state are for those that may follow.
    keeps_state = job.max_restarts > 0
    with handled_signals() as signals, ExitStack() as cleanup:
        host = Host(
            job.program, job.devices_per_process, forks=job.forks, address=address, follow=logs.follow,
            signals=signals, keeps_state=keeps_state,
        )  # fmt: skip
        cleanup.callback(host.close)

        def gather() -> list[Host]:
            host.prepare()
            return [host]

        return supervise(job, logs, signals, gather)


def supervise(job: Job, logs: Logs, signals: list[int], gather: Callable[[], Sequence[ProcessHost]]) -> int:
    """Start the processes, follow them, and end with them; after a failure, start them again as often as asked.

    Args:
      job, logs: what is wanted, and where it is told.
      signals: those that have come, in order; they ask for the end.
      gather: gives the hosts of the next life of the run, prepared; none if a signal has come meanwhile.

    Returns:
      The exit status: 0 if every process ended well; 75 if they were asked to end, and have saved; else that of the
      first that failed (128 + its number if it was a signal); 74 if all ended well, and output was lost.
    """
    lives, run_id, attempt, goes_on = Lives(job.max_restarts, logs.say), secrets.token_hex(8), 0, True
    cause: Cause | None = None
    while goes_on:
        attempt += 1
        with _Life(job, gather(), logs, signals) as life:
            try:
                life.start(run_id, attempt)
                cause = life.follow(lives)
            except NotForked as error:
                cause = Cause.asked(signals.pop(0)) if signals else Cause.not_forked(error)
        logs.drain(seconds=1.0)
        goes_on = not (signals or life.is_asked) and lives.goes_on(cause, life.reached)
    if logs.lost is not None:
        with suppress(OSError):  # else Python tries once more when it ends, and has an exit status of its own
            logs.close()
        logs.say(f"output of the run is lost: {logs.lost}. Make room where it goes, or send it elsewhere.")
    if cause is None:
        return 0 if logs.lost is None else os.EX_IOERR
    logs.say(cause.message)
    if cause.index is not None:
        logs.tell_error(cause.index)
    return cause.status


@dataclass
class _Process:
    """A process of a life of the run.

    Attributes:
      host, state: where it runs, and what has come to be known of it.
      over_since: the time when its program was known to be over.
      is_told: whether the user was told that the launcher waits for it.
      is_overdue: whether it was killed because it did not end after its program.
    """

    host: ProcessHost
    state: ProcessState
    over_since: float | None = None
    is_told: bool = False
    is_overdue: bool = False

    @property
    def index(self) -> int:
        return self.state.index

    @property
    def status(self) -> int | None:
        """As `Popen.returncode`, once it has ended."""
        # One that was killed because it did not end has ended as its program did: well, if it could not tell.
        return (self.state.over or 0) if self.is_overdue and self.state.status is not None else self.state.status

    @property
    def ended_well(self) -> bool:
        """Whether it has ended, and by no failure."""
        return self.status in (0, PREEMPTED_STATUS)

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started."""
        self.host.signal(self.index, number)


class _Life:
    """One life of the run: its processes, from their start until none of them is left.

    Attributes:
      is_asked: whether a signal has asked for the end, maybe after a failure.
    """

    is_asked = False

    def __init__(self, job: Job, hosts: Sequence[ProcessHost], logs: Logs, signals: list[int]) -> None:
        self._job, self._hosts, self._logs, self._signals = job, hosts, logs, signals
        self._processes = [
            _Process(host, ProcessState(number * job.num_processes + place))
            for number, host in enumerate(hosts)
            for place in range(job.num_processes)
        ]
        self._service: int | None = None  # its exit status
        self._service_is_stopped = False
        self._stopped_since: dict[int | None, float] = {}  # by the index of a process, or None for the service
        self._lost: Cause | None = None

    def __enter__(self) -> _Life:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        for host in self._hosts:
            host.end()
        # All hosts at once. Who asks for the end meanwhile does not wait: hosts that are given up end by themselves.
        while not (all(host.has_ended() for host in self._hosts) or self._signals):
            time.sleep(_POLL_SECONDS)

    @property
    def reached(self) -> int:
        """The furthest step that a process has begun."""
        return max((process.state.last for process in self._processes), default=0)

    @property
    def _alive(self) -> list[_Process]:
        return [process for process in self._processes if process.status is None]

    def start(self, run_id: str, attempt: int) -> None:
        """Start the coordination service and the processes."""
        if not self._processes:
            return
        settings = LaunchSettings(
            coordinator_address=self._hosts[0].address,
            num_processes=len(self._processes),
            process_id=0,
            bind_address=self._job.address,
            failure_timeout=self._job.failure_timeout,
            processes_per_host=self._job.num_processes,
            run_id=run_id,
            attempt=attempt,
        )
        if len(self._processes) > 1:
            self._hosts[0].serve(settings)
        self._logs.forget_errors()
        for process, each in zip(self._processes, settings.for_every_process(), strict=True):
            process.host.start(each)

    def follow(self, lives: Lives) -> Cause | None:
        """Wait until all processes have ended, or end them; returns the cause, if not all ended well."""
        stopping: Cause | None = None
        deadlines: list[tuple[float, int]] = []  # when to send which signal to those that still live
        while True:
            failed = self._hear() or self._stopped_while_starting()
            alive = self._alive
            lives.look([process.state for process in self._processes], ended=not alive)
            now = time.monotonic()
            if self._signals:
                number = self._signals.pop(0)
                # The first signal asks the processes to end; a second one kills them.
                patient = stopping is None
                stopping, self.is_asked = stopping or Cause.asked(number), True
                for process in alive:
                    process.signal(number if patient and process.state.connected else signal.SIGKILL)
                deadlines = [(now + self._job.grace, signal.SIGKILL)] if patient else []
            elif failed is not None and stopping is None:
                stopping = failed
                self._tell_others(failed)
                if self._job.max_restarts and failed.kind != "end" and failed.status != PEER_FAILED_STATUS:
                    deadlines = [(now + _SECONDS_BEFORE_RESTART, signal.SIGKILL)]
                    continue
                # They end by themselves within 10 % of the failure timeout, and print their waits. If they noticed
                # the failure themselves, by a silence that took 60 %, that time is nearly over.
                timeout = self._job.failure_timeout
                patience = (0.13 if failed.status == PEER_FAILED_STATUS else 0.3) * timeout
                deadlines = [(now + patience, signal.SIGTERM), (now + patience + 0.05 * timeout, signal.SIGKILL)]
            if not alive:
                return self._preempted(stopping) or self._better(stopping)
            while deadlines and now >= deadlines[0][0]:
                _, number = deadlines.pop(0)
                stopping = self._blame_stopped(stopping, alive)
                if not self._job.max_restarts:
                    self._announce_end(alive, number)
                for process in alive:
                    process.signal(number)
            if not deadlines:
                self._end_overdue(alive, now)
            time.sleep(_POLL_SECONDS)

    def _hear(self) -> Cause | None:
        """Hear what the hosts tell; returns the first failure among those that are new."""
        living, found, self._service_is_stopped = self._alive, None, False
        for host in self._hosts:
            report = host.poll()
            self._service_is_stopped = self._service_is_stopped or report.service_is_stopped
            for state in report.processes:
                self._processes[state.index].state = state
            self._service = self._service if report.service is None else report.service
            found = self._lose(host) or found
        for process in living:
            if found is not None and found.status != PEER_FAILED_STATUS:
                break
            if process.status is not None and not process.ended_well:
                found = self._cause(process)
        # A process without the service ends, by this package or by JAX, and the launcher may notice that end first.
        by_service = (PEER_FAILED_STATUS, exit_status(-signal.SIGABRT))
        suspected = bool(self._alive) if found is None else found.status in by_service
        if suspected and self._service is not None:
            text = f"the coordination service {describe_end(self._service)}: the processes cannot meet without it."
            found = Cause(None, text, exit_status(self._service) or 1, "crash")
        return found

    def _lose(self, host: ProcessHost) -> Cause | None:
        """Give up the processes of a host that is lost; returns the cause, if it had any."""
        lost = [process for process in self._alive if process.host is host] if host.lost is not None else []
        if not lost:
            return None
        for process in lost:
            process.state = replace(process.state, status=-signal.SIGKILL)
        indices = " and ".join(str(process.index) for process in lost)
        text = f"host {host.name} is lost, with process {indices} of {len(self._processes)}: {host.lost}"
        self._lost = self._lost or Cause(None, text, exit_status(-signal.SIGKILL), "crash")
        return self._lost

    def _cause(self, process: _Process) -> Cause:
        status = process.status or 0
        text = f"process {process.index} of {len(self._processes)} failed first: it {describe_end(status)}."
        if status == PEER_FAILED_STATUS:
            text = f"process {process.index} of {len(self._processes)} was the first to end because of another one."
        if status == INTERRUPTED_STATUS:  # all end after the same step: any of them may have got the signal
            text = f"interrupted (Ctrl-C): process {process.index} of {len(self._processes)} was the first to end."
        lost = status < 0 or status == PEER_FAILED_STATUS
        kind = "end" if status in _ASKED_STATUSES else "crash" if lost else "error"
        return Cause(process.index, text, exit_status(status), kind)

    def _better(self, cause: Cause | None) -> Cause | None:
        """The true cause, if the first process that ended did so because of another one."""
        if cause is None or cause.status not in (PEER_FAILED_STATUS, exit_status(-signal.SIGABRT)):
            return cause
        # Ray may tell the loss of a host, with the service on it perhaps, after the ends that this has caused.
        return self._lost or (self._own_failure() if cause.status == PEER_FAILED_STATUS else None) or cause

    def _own_failure(self) -> Cause | None:
        """The failure of the first process that has ended by itself, and not well."""
        for process in self._processes:
            if not process.ended_well and process.status not in _CAUSED_STATUSES:
                return self._cause(process)
        return None

    def _preempted(self, cause: Cause | None) -> Cause | None:
        """The cause if all processes have saved after SIGTERM, which is no failure; None if they have not."""
        if not any(process.status == PREEMPTED_STATUS for process in self._processes):
            return None
        if cause is not None and cause.status != 128 + signal.SIGTERM:
            return None
        if (failure := self._own_failure()) is not None:
            return failure
        if not all(process.ended_well for process in self._processes):
            return None
        return Cause(None, describe_preemption(len(self._processes)), PREEMPTED_STATUS, "end")

    def _blame_stopped(self, cause: Cause | None, alive: Sequence[_Process]) -> Cause | None:
        """A stopped process is the cause, if there is one: it cannot report itself, and the others end by it."""
        if cause is not None and cause.status != PEER_FAILED_STATUS:
            return cause
        for process in alive:
            if process.state.is_stopped:
                text = f"process {process.index} of {len(self._processes)} was stopped (SIGSTOP), and then killed."
                return Cause(process.index, text, 128 + signal.SIGSTOP, "crash")
        return cause

    def _stopped_while_starting(self) -> Cause | None:
        """The cause if a process or the service was stopped before all are connected: they do not yet watch it."""
        alive, now = self._alive, time.monotonic()
        if all(process.state.connected for process in alive):
            return None
        stopped = {process.index: process.state.is_stopped for process in alive} | {None: self._service_is_stopped}
        for index, is_stopped in stopped.items():
            if not is_stopped:
                self._stopped_since.pop(index, None)
            elif now - self._stopped_since.setdefault(index, now) > self._job.failure_timeout:
                host = self._hosts[0] if index is None else self._processes[index].host
                host.signal(index, signal.SIGKILL)
                who = "the coordination service" if index is None else f"process {index} of {len(self._processes)}"
                return Cause(index, f"{who} was stopped (SIGSTOP), and then killed.", 128 + signal.SIGSTOP, "crash")
        return None

    def _tell_others(self, cause: Cause) -> None:
        if cause.status == PEER_FAILED_STATUS:
            return  # the other processes have told it
        subject = "-" if cause.index is None else str(cause.index)
        how = cause.message.partition("failed first: ")[2].rstrip(".") or cause.message
        for host in self._hosts:
            host.tell(f"{subject} {how}")

    def _announce_end(self, alive: Sequence[_Process], number: int) -> None:
        """Say which processes are ended: such a process cannot always say so itself."""
        for process in alive:
            why = "has not ended by itself" if process.state.connected else "was still starting"
            self._logs.say(
                f"process {process.index} of {len(self._processes)} {why}: it is ended by {signal_name(number)}."
            )

    def _end_overdue(self, alive: Sequence[_Process], now: float) -> None:
        """Wait no longer than `grace` for a process whose program is over: no other process needs it."""
        # All programs end together: once one process has ended well, the programs of all are over.
        over = any(process.ended_well for process in self._processes)
        for process in alive:
            if (over or process.state.over is not None) and process.over_since is None:
                process.over_since = now
            if process.over_since is None or process.is_overdue:
                continue
            waited, grace = now - process.over_since, self._job.grace
            why = "an object's `__del__`, a thread or an exit handler may hold it"
            if process.state.is_stopped:
                why = "it was stopped (SIGSTOP)"
            text = f"process {process.index} of {len(self._processes)} has ended its program, but is still running"
            if waited > grace:
                process.is_overdue = True
                self._logs.say(f"{text}: {why}. After {grace:g} s (--grace) it is killed.")
                process.signal(signal.SIGKILL)
            elif waited > _SECONDS_IN_SILENCE and not process.is_told:
                process.is_told = True
                self._logs.say(f"{text}: {why}. The launcher waits for it for up to {grace:g} s (--grace).")
