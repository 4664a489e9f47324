"""Several processes of one program on this machine: started, supervised and ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from rich.console import Console

from jaxpp_flax import _compat
from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.logs import Logs
from jaxpp_flax.launch.process.process_end import INTERRUPTED_STATUS
from jaxpp_flax.launch.settings import (
    LaunchError,
    LaunchSettings,
    describe_preemption,
    device_environment,
    join_host_and_port,
)
from jaxpp_flax.launch.signals import (
    describe_end,
    exit_status,
    handled_signals,
    is_stopped,
    kill_group,
    signal_name,
)
from jaxpp_flax.launch.supervised_process import SupervisedProcess
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT, PEER_FAILED_STATUS, PREEMPTED_STATUS

__all__ = ["LOOPBACK", "LocalJob", "child_environment", "run"]

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
        if not self.grace > 0:
            raise LaunchError(f"--grace {self.grace}: it must be a number of seconds above 0.")
        if not self.failure_timeout > 0:
            raise LaunchError(f"--failure-timeout {self.failure_timeout}: it must be a number of seconds above 0.")


# The exit statuses of a process that ends because of another one, or by its launcher.
_CAUSED_STATUSES = (PEER_FAILED_STATUS, -signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True)
class _Cause:
    """Why the run ends before its time."""

    index: int | None
    message: str
    status: int


def run(job: LocalJob, *, out: IO[str] | None = None, console: Console | None = None) -> int:
    """Start the processes, print their output, and end with them.

    Returns:
      The exit status: 0 if every process ended well; 75 if they were asked to end, and have saved; else that of the
      first that failed (128 + its number if it was a signal).
    """
    console = console or Console(stderr=True)
    logs = Logs(job.num_processes, console, out or sys.stdout)

    def say(text: str) -> None:
        console.print(f"\njaxpp_flax.launch: {text}", style="bold", markup=False, highlight=False, soft_wrap=True)

    with handled_signals() as signals, _Job(job, logs, say) as processes:
        cause = processes.follow(signals)
    logs.drain(seconds=1.0)
    if cause is None:
        return 0
    say(cause.message)
    if cause.index is not None:
        for line in logs.last_error(cause.index):
            console.file.write(line + "\n")
    return cause.status


class _Job:
    """The processes, from their start until none of them is left."""

    def __init__(self, job: LocalJob, logs: Logs, say: Callable[[str], None]) -> None:
        self._job, self._logs, self._say = job, logs, say
        self._processes: list[SupervisedProcess] = []
        self._service: subprocess.Popen[bytes] | None = None
        # The launcher holds the port, also after the service has taken it: no other program gets it.
        self._reserved = coordinator.reserve_port(job.address)

    def __enter__(self) -> _Job:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        job = self._job
        port = self._reserved.getsockname()[1]
        settings = LaunchSettings(
            coordinator_address=join_host_and_port(job.address, port),
            num_processes=job.num_processes,
            process_id=0,
            bind_address=job.address,
            failure_timeout=job.failure_timeout,
        )
        if job.num_processes > 1:
            self._service = coordinator.start(
                settings.coordinator_address, job.num_processes, job.failure_timeout, linger=job.failure_timeout
            )
        for each in settings.for_every_process():
            self._processes.append(self._start_process(each))

    def _start_process(self, settings: LaunchSettings) -> SupervisedProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        settings = replace(settings, control_fd=theirs.fileno())
        popen = subprocess.Popen(
            [sys.executable, "-m", "jaxpp_flax.launch.child", *self._job.program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(os.environ, settings, self._job.devices_per_process),
            pass_fds=[theirs.fileno()],
            process_group=0,
            text=True,
            errors="replace",
        )
        theirs.close()
        process = SupervisedProcess(settings.process_id, popen, ours)
        for stream, errors in ((popen.stdout, False), (popen.stderr, True)):
            if stream is not None:
                self._logs.follow(process.index, stream, errors=errors)
        return process

    def follow(self, signals: list[int]) -> _Cause | None:
        """Wait until all processes have ended, or end them; returns the cause, if not all ended well."""
        stopping: _Cause | None = None
        deadlines: list[tuple[float, int]] = []  # when to send which signal to those that still live
        while True:
            failed = self._reap()
            alive = [process for process in self._processes if process.status is None]
            now = time.monotonic()
            if signals:
                number = signals.pop(0)
                # The first signal asks the processes to end; a second one kills them.
                patient = stopping is None
                stopping = stopping or _Cause(None, f"ended by {signal_name(number)}.", 128 + number)
                _signal_all(alive, number if patient else signal.SIGKILL)
                deadlines = [(now + self._job.grace, signal.SIGKILL)] if patient else []
            elif failed is not None and stopping is None:
                stopping = failed
                self._tell_others(failed, alive)
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
                self._announce_end(alive, number, now)
                _signal_all(alive, number)
            if not deadlines:
                self._end_overdue(alive, now)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> _Cause | None:
        """Notice the ends of processes; returns the first failure among those that are new."""
        found: _Cause | None = None
        for process in self._processes:
            if not process.reap():
                continue
            if not process.ended_well and (found is None or found.status == PEER_FAILED_STATUS):
                found = self._cause(process)
        unfinished = any(process.status is None for process in self._processes)
        # JAX aborts a process that loses the service, and the launcher may notice that end first.
        suspected = unfinished if found is None else found.status == exit_status(-signal.SIGABRT)
        if suspected and self._service is not None and self._service.poll() is not None:
            status = self._service.returncode
            text = f"the coordination service {describe_end(status)}. JAX ends all processes without it."
            found = _Cause(None, text, exit_status(status) or 1)
        return found

    def _cause(self, process: SupervisedProcess) -> _Cause:
        status = process.status or 0
        text = f"process {process.index} of {self._job.num_processes} failed first: it {describe_end(status)}."
        if status == PEER_FAILED_STATUS:
            text = f"process {process.index} of {self._job.num_processes} was the first to end because of another one."
        if status == INTERRUPTED_STATUS:  # all end after the same step: any of them may have got the signal
            text = f"interrupted (Ctrl-C): process {process.index} of {self._job.num_processes} was the first to end."
        return _Cause(process.index, text, exit_status(status))

    def _better(self, cause: _Cause | None) -> _Cause | None:
        """The true cause, if the first process that ended did so because of another one."""
        if cause is None or cause.status != PEER_FAILED_STATUS:
            return cause
        return self._own_failure() or cause

    def _own_failure(self) -> _Cause | None:
        """The failure of the first process that has ended by itself, and not well."""
        for process in self._processes:
            if not process.ended_well and process.status not in _CAUSED_STATUSES:
                return self._cause(process)
        return None

    def _preempted(self, cause: _Cause | None) -> _Cause | None:
        """The cause if all processes have saved after SIGTERM, which is no failure; None if they have not."""
        if not any(process.status == PREEMPTED_STATUS for process in self._processes):
            return None
        if cause is not None and cause.status != 128 + signal.SIGTERM:
            return None
        if (failure := self._own_failure()) is not None:
            return failure
        if not all(process.ended_well for process in self._processes):
            return None
        return _Cause(None, describe_preemption(self._job.num_processes), PREEMPTED_STATUS)

    def _blame_stopped(self, cause: _Cause | None, alive: Sequence[SupervisedProcess]) -> _Cause | None:
        """A stopped process is the cause, if there is one: it cannot report itself, and the others end by it."""
        if cause is not None and cause.status != PEER_FAILED_STATUS:
            return cause
        for process in alive:
            if is_stopped(process.popen.pid):
                text = f"process {process.index} of {self._job.num_processes} was stopped (SIGSTOP), and then killed."
                return _Cause(process.index, text, 128 + signal.SIGSTOP)
        return cause

    def _tell_others(self, cause: _Cause, alive: Sequence[SupervisedProcess]) -> None:
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
            why = "has not ended by itself" if process.listens else "was still starting"
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

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        for process in self._processes:
            if process.status is None:
                kill_group(process.popen.pid)
                process.popen.wait()
                process.control.close()
        if self._service is not None:
            kill_group(self._service.pid)
            self._service.wait()
            if self._service.stdin is not None:
                self._service.stdin.close()
        self._reserved.close()


def _signal_all(processes: Sequence[SupervisedProcess], number: int) -> None:
    for process in processes:
        process.signal(number)


def child_environment(
    environment: Mapping[str, str], settings: LaunchSettings, devices_per_process: int
) -> dict[str, str]:
    """The environment of one process, made from the launcher's own.

    Example:
      >>> settings = LaunchSettings(coordinator_address="127.0.0.1:4000", num_processes=2, process_id=1)
      >>> child = child_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, settings, 2)
      >>> child["JAX_NUM_CPU_DEVICES"], child["JAX_LOCAL_DEVICE_IDS"], child["XLA_FLAGS"]
      ('2', '2,3', '')
    """
    first = settings.process_id * devices_per_process
    proxies: dict[str, str] = {}
    if any(name.lower().endswith("_proxy") for name in environment):
        # gRPC would look for this machine behind the proxy.
        known = environment.get("no_proxy", environment.get("NO_PROXY", ""))
        proxies = dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, [known, settings.bind_address])))
    return {
        **environment,
        **settings.to_environment(),
        **device_environment(environment, devices_per_process),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + devices_per_process))),
        **proxies,
    }
