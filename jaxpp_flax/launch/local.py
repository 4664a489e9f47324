"""Several processes of one program on this machine: started, supervised and ended together."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console

from jaxpp_flax import _compat
from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.host.host import Host
from jaxpp_flax.launch.host.signals import (
    describe_end,
    exit_status,
    handled_signals,
    is_stopped,
    kill_group,
    signal_name,
)
from jaxpp_flax.launch.host.supervised_process import SupervisedProcess
from jaxpp_flax.launch.host.warm import NotForked
from jaxpp_flax.launch.lives import Cause, Lives
from jaxpp_flax.launch.logs import Logs
from jaxpp_flax.launch.process.process_end import INTERRUPTED_STATUS
from jaxpp_flax.launch.settings import (
    LaunchError,
    LaunchSettings,
    describe_preemption,
    join_host_and_port,
)
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT, PEER_FAILED_STATUS, PREEMPTED_STATUS

__all__ = ["LOOPBACK", "LocalJob", "run"]

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.05
# Python needs a moment to end.
_SECONDS_IN_SILENCE = 10.0


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What to start: the options of the command line, as `cli.py` describes them.

    The program is a file's path, or "-m" and a module's name; then its arguments.
    """

    program: Sequence[str]
    num_processes: int
    devices_per_process: int = 1
    address: str = LOOPBACK
    failure_timeout: float = DEFAULT_FAILURE_TIMEOUT
    grace: float = 120.0
    max_restarts: int = 0
    forks: bool = sys.platform.startswith("linux")

    def __post_init__(self) -> None:
        if not self.program or self.program == ["-m"]:
            raise LaunchError("no program: give a script, or -m and a module.")
        if self.program[0] != "-m" and not Path(self.program[0]).is_file():
            raise LaunchError(f"there is no file {self.program[0]!r} to run.")
        if self.num_processes < 1:
            raise LaunchError(
                f"-n {self.num_processes}: at least one process is needed. Give the number, as in `-n 4`."
            )
        if self.num_processes > 1 and (why := _compat.why_one_process()) is not None:
            raise LaunchError(why)
        if self.devices_per_process < 1:
            raise LaunchError(f"--devices-per-process {self.devices_per_process}: at least one device is needed.")
        if self.max_restarts < 0:
            raise LaunchError(f"--max-restarts {self.max_restarts}: it must be 0 or more.")
        if not self.grace > 0:
            raise LaunchError(f"--grace {self.grace}: it must be a number of seconds above 0.")
        if not self.failure_timeout > 0:
            raise LaunchError(f"--failure-timeout {self.failure_timeout}: it must be a number of seconds above 0.")


# The exit statuses of a process that ends because of another one, or by its launcher.
_CAUSED_STATUSES = (PEER_FAILED_STATUS, -signal.SIGTERM, -signal.SIGKILL)
# Of one that was asked to end.
_ASKED_STATUSES = (INTERRUPTED_STATUS, -signal.SIGINT, -signal.SIGTERM)
# If all are started again at once, how long the others may still print.
_SECONDS_BEFORE_RESTART = 0.5


def run(job: LocalJob, *, out: IO[str] | None = None, console: Console | None = None) -> int:
    """Start the processes, print their output, and end with them; after a failure, start them again as often as asked.

    Returns:
      The exit status: 0 if every process ended well; 75 if they were asked to end, and have saved; else that of the
      first that failed (128 + its number if it was a signal); 74 if all ended well, and output was lost.
    """
    console = console or Console(stderr=True)
    logs = Logs(job.num_processes, console, out or sys.stdout)

    def say(text: str) -> None:
        console.print(f"\njaxpp_flax.launch: {text}", style="bold", markup=False, highlight=False, soft_wrap=True)

    lives, run_id, attempt, goes_on = Lives(job.max_restarts, say), secrets.token_hex(8), 0, True
    cause: Cause | None = None
    with (
        handled_signals() as signals,
        closing(Host(job.program, job.devices_per_process, forks=job.forks, signals=signals)) as host,
    ):
        while goes_on:
            attempt += 1
            with _Life(job, host, logs, say) as life:
                try:
                    life.start(run_id, attempt)
                    cause = life.follow(signals, lives)
                except NotForked as error:
                    cause = Cause.asked(signals.pop(0)) if signals else Cause.not_forked(error)
                reached = max((process.progress.last for process in host.processes), default=0)
            logs.drain(seconds=1.0)
            goes_on = not (signals or life.is_asked) and lives.goes_on(cause, reached)
    if logs.lost is not None:
        with suppress(OSError):  # else Python tries once more when it ends, and has an exit status of its own
            logs.close()
        with suppress(OSError):  # errors may go there too
            say(f"output of the run is lost: {logs.lost}. Make room where it goes, or send it elsewhere.")
    if cause is None:
        return 0 if logs.lost is None else os.EX_IOERR
    say(cause.message)
    if cause.index is not None:
        for line in logs.last_error(cause.index):
            console.file.write(line + "\n")
    return cause.status


class _Life:
    """One life of the run: its processes, from their start until none of them is left.

    Attributes:
      is_asked: whether a signal has asked for the end, maybe after a failure.
    """

    is_asked = False

    def __init__(self, job: LocalJob, host: Host, logs: Logs, say: Callable[[str], None]) -> None:
        self._job, self._host, self._logs, self._say = job, host, logs, say
        # The launcher holds the port, also after the service has taken it: no other program gets it.
        self._reserved = coordinator.reserve_port(job.address)
        self._stopped_since: dict[int, float] = {}  # by the number of a process, while the processes start

    def __enter__(self) -> _Life:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        self._host.end()
        self._reserved.close()

    @property
    def _processes(self) -> list[SupervisedProcess]:
        return self._host.processes

    def start(self, run_id: str, attempt: int) -> None:
        """Start the coordination service and the processes."""
        job = self._job
        settings = LaunchSettings(
            coordinator_address=join_host_and_port(job.address, self._reserved.getsockname()[1]),
            num_processes=job.num_processes,
            process_id=0,
            bind_address=job.address,
            failure_timeout=job.failure_timeout,
            run_id=run_id,
            attempt=attempt,
        )
        if job.num_processes > 1:
            self._host.serve(settings)
        self._logs.forget_errors()
        for each in settings.for_every_process():
            self._host.start(each, self._logs.follow)

    def follow(self, signals: list[int], lives: Lives) -> Cause | None:
        """Wait until all processes have ended, or end them; returns the cause, if not all ended well."""
        stopping: Cause | None = None
        deadlines: list[tuple[float, int]] = []  # when to send which signal to those that still live
        while True:
            failed = self._reap() or self._stopped_while_starting()
            alive = self._host.alive
            lives.look([process.progress for process in self._processes], ended=not alive)
            now = time.monotonic()
            if signals:
                number = signals.pop(0)
                # The first signal asks the processes to end; a second one kills them.
                patient = stopping is None
                stopping, self.is_asked = stopping or Cause.asked(number), True
                for process in alive:
                    process.hear(now)
                    process.signal(number if patient and process.connected else signal.SIGKILL)
                deadlines = [(now + self._job.grace, signal.SIGKILL)] if patient else []
            elif failed is not None and stopping is None:
                stopping = failed
                self._tell_others(failed, alive)
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
                    self._announce_end(alive, number, now)
                self._host.signal(number)
            if not deadlines:
                self._end_overdue(alive, now)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> Cause | None:
        """Notice the ends of processes; returns the first failure among those that are new."""
        found: Cause | None = None
        for process in self._processes:
            if not process.reap():
                continue
            if not process.ended_well and (found is None or found.status == PEER_FAILED_STATUS):
                found = self._cause(process)
        unfinished = any(process.status is None for process in self._processes)
        # JAX aborts a process that loses the service, and the launcher may notice that end first.
        suspected = unfinished if found is None else found.status == exit_status(-signal.SIGABRT)
        service = self._host.service
        if suspected and service is not None and (status := service.poll()) is not None:
            text = f"the coordination service {describe_end(status)}. JAX ends all processes without it."
            found = Cause(None, text, exit_status(status) or 1, "crash")
        return found

    def _cause(self, process: SupervisedProcess) -> Cause:
        status = process.status or 0
        text = f"process {process.index} of {self._job.num_processes} failed first: it {describe_end(status)}."
        if status == PEER_FAILED_STATUS:
            text = f"process {process.index} of {self._job.num_processes} was the first to end because of another one."
        if status == INTERRUPTED_STATUS:  # all end after the same step: any of them may have got the signal
            text = f"interrupted (Ctrl-C): process {process.index} of {self._job.num_processes} was the first to end."
        lost = status < 0 or status == PEER_FAILED_STATUS
        kind = "end" if status in _ASKED_STATUSES else "crash" if lost else "error"
        return Cause(process.index, text, exit_status(status), kind)

    def _better(self, cause: Cause | None) -> Cause | None:
        """The true cause, if the first process that ended did so because of another one."""
        if cause is None or cause.status != PEER_FAILED_STATUS:
            return cause
        return self._own_failure() or cause

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
        return Cause(None, describe_preemption(self._job.num_processes), PREEMPTED_STATUS, "end")

    def _blame_stopped(self, cause: Cause | None, alive: Sequence[SupervisedProcess]) -> Cause | None:
        """A stopped process is the cause, if there is one: it cannot report itself, and the others end by it."""
        if cause is not None and cause.status != PEER_FAILED_STATUS:
            return cause
        for process in alive:
            if is_stopped(process.popen.pid):
                text = f"process {process.index} of {self._job.num_processes} was stopped (SIGSTOP), and then killed."
                return Cause(process.index, text, 128 + signal.SIGSTOP, "crash")
        return cause

    def _stopped_while_starting(self) -> Cause | None:
        """The cause if a process or the service was stopped before all are connected: they do not yet watch it."""
        alive, service, now = self._host.alive, self._host.service, time.monotonic()
        for process in alive:
            process.hear(now)
        if all(process.connected for process in alive):
            return None
        those = {process.popen.pid: process.index for process in alive}
        for pid, index in {**those, **({service.pid: None} if service is not None else {})}.items():
            if not is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > self._job.failure_timeout:
                kill_group(pid)
                who = "the coordination service" if index is None else f"process {index} of {self._job.num_processes}"
                return Cause(index, f"{who} was stopped (SIGSTOP), and then killed.", 128 + signal.SIGSTOP, "crash")
        return None

    def _tell_others(self, cause: Cause, alive: Sequence[SupervisedProcess]) -> None:
        if cause.status == PEER_FAILED_STATUS:
            return  # the other processes have told it
        subject = "-" if cause.index is None else str(cause.index)
        how = cause.message.partition("failed first: ")[2].rstrip(".") or cause.message
        for process in alive:
            process.tell(f"{subject} {how}")

    def _announce_end(self, alive: Sequence[SupervisedProcess], number: int, now: float) -> None:
        """Say which processes are ended: such a process cannot always say so itself."""
        for process in alive:
            process.hear(now)
            why = "has not ended by itself" if process.connected else "was still starting"
            self._say(
                f"process {process.index} of {self._job.num_processes} {why}: it is ended by {signal_name(number)}."
            )

    def _end_overdue(self, alive: Sequence[SupervisedProcess], now: float) -> None:
        """Wait no longer than `grace` for a process whose program is over: no other process needs it."""
        # All programs end together: once one process has ended well, the programs of all are over.
        over = any(process.ended_well for process in self._processes)
        for process in alive:
            process.hear(now)
            if over and process.over_since is None:
                process.over_since = now
            if process.over_since is None or process.is_overdue:
                continue
            waited, grace = now - process.over_since, self._job.grace
            why = "an object's `__del__`, a thread or an exit handler may hold it"
            if is_stopped(process.popen.pid):
                why = "it was stopped (SIGSTOP)"
            text = f"process {process.index} of {self._job.num_processes} has ended its program, but is still running"
            if waited > grace:
                process.is_overdue = True
                self._say(f"{text}: {why}. After {grace:g} s (--grace) it is killed.")
                process.signal(signal.SIGKILL)
            elif waited > _SECONDS_IN_SILENCE and not process.is_told:
                process.is_told = True
                self._say(f"{text}: {why}. The launcher waits for it for up to {grace:g} s (--grace).")
