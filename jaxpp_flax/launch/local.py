"""Several processes of one program on this machine: started, followed and ended together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from rich.console import Console

from jaxpp_flax.engine import _compat
from jaxpp_flax.engine.coordination import PEER_FAILED_STATUS
from jaxpp_flax.engine.watch import DEFAULT_FAILURE_TIMEOUT
from jaxpp_flax.launch import coordinator, guard
from jaxpp_flax.launch.cores import running_on, share_of_cores, usable_cores
from jaxpp_flax.launch.logs import Logs
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings

__all__ = ["LOOPBACK", "LocalJob", "child_environment", "run"]

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What to start.

    Args:
      program: a file's path, or "-m" and a module's name; then its arguments.
      num_processes: how many processes.
      devices_per_process: devices of each: virtual ones on CPU, else the accelerators in order.
      address: the local address that all sockets listen on.
      failure_timeout: seconds within which a failure of one process has ended all.
      grace: seconds that the processes have to end after Ctrl-C or SIGTERM, for a last checkpoint.
      log_dir: a folder for each process's output; None: none.
      split_cores: give each process its share of the cores that this one may use, if there are enough.
    """

    program: Sequence[str]
    num_processes: int
    devices_per_process: int = 1
    address: str = LOOPBACK
    failure_timeout: float = DEFAULT_FAILURE_TIMEOUT
    grace: float = 60.0
    log_dir: Path | None = None
    split_cores: bool = True

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
        if not self.failure_timeout > 0:
            raise LaunchError(f"--failure-timeout {self.failure_timeout}: it must be a number of seconds above 0.")


@dataclass
class _Process:
    """A process of the run, as its launcher sees it."""

    index: int
    popen: subprocess.Popen[str]
    control: IO[bytes]
    status: int | None = None  # as `Popen.returncode`, once it has ended


@dataclass(frozen=True)
class _Cause:
    """Why the run ends before its time."""

    index: int | None
    message: str
    status: int


@dataclass
class _Signals:
    """The signals that this launcher got, in order."""

    received: list[int] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def run(job: LocalJob, *, out: IO[str] | None = None, console: Console | None = None) -> int:
    """Start the processes, print what they write, and end with them.

    Args:
      job: what to start.
      out: where their standard output goes; None: this process's.
      console: where their errors go; None: this process's.

    Returns:
      The exit status: 0 if every process ended well, else that of the first that failed (128 + its number if it was a
      signal).
    """
    console = console or Console(stderr=True)
    logs = Logs(job.num_processes, console, out or sys.stdout, job.log_dir)
    with _handled_signals() as signals, _Job(job, logs) as processes:
        cause = processes.follow(signals)
    logs.drain(seconds=1.0)
    if cause is None:
        return 0
    console.print(f"\njaxpp_flax.launch: {cause.message}", style="bold", markup=False, highlight=False, soft_wrap=True)
    if cause.index is not None:
        for line in logs.last_error(cause.index):
            console.file.write(line + "\n")
    return cause.status


class _Job:
    """The processes, from their start to the moment when nothing is left of them."""

    def __init__(self, job: LocalJob, logs: Logs) -> None:
        self._job, self._logs = job, logs
        self._processes: list[_Process] = []
        self._service: subprocess.Popen[bytes] | None = None
        # The port stays this launcher's until the service has taken it, and after: nobody else gets it meanwhile.
        self._reserved = _reserve_port(job.address)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

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
        host = f"[{job.address}]" if ":" in job.address else job.address
        settings = LaunchSettings(
            coordinator_address=f"{host}:{port}",
            num_processes=job.num_processes,
            process_id=0,
            bind_address=job.address,
            failure_timeout=job.failure_timeout,
        )
        if job.num_processes > 1:
            self._service = coordinator.start(
                settings.coordinator_address, job.num_processes, job.failure_timeout, linger=job.failure_timeout
            )
            self._tell_guard("+", self._service.pid)
        for index in range(job.num_processes):
            self._processes.append(self._start_process(replace(settings, process_id=index)))

    def _start_process(self, settings: LaunchSettings) -> _Process:
        reading, writing = os.pipe()
        settings = replace(settings, control_fd=reading)
        cores = share_of_cores(usable_cores(), settings.process_id, self._job.num_processes)
        with running_on(cores if self._job.split_cores else ()):
            popen = subprocess.Popen(
                [sys.executable, "-m", "jaxpp_flax.launch.child", *self._job.program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(os.environ, settings, self._job.devices_per_process),
                pass_fds=[reading],
                process_group=0,
                text=True,
                errors="replace",
            )
        os.close(reading)
        self._tell_guard("+", popen.pid)
        process = _Process(settings.process_id, popen, os.fdopen(writing, "wb", buffering=0))
        for stream, errors in ((popen.stdout, False), (popen.stderr, True)):
            if stream is not None:
                self._logs.follow(process.index, stream, errors=errors)
        return process

    def follow(self, signals: _Signals) -> _Cause | None:
        """Wait for all processes to end, or make them; says why, if not all ended well."""
        stopping: _Cause | None = None
        deadlines: list[tuple[float, int]] = []  # when to send which signal to those that still live
        while True:
            failed = self._reap()
            alive = [process for process in self._processes if process.status is None]
            now = time.monotonic()
            if signals.received:
                number = signals.received.pop(0)
                # The first one asks; one that comes while they are ending insists.
                patient = stopping is None
                stopping = stopping or _Cause(None, f"ended by {_name(number)}.", 128 + number)
                self._signal(alive, number if patient else signal.SIGKILL)
                deadlines = [(now + self._job.grace, signal.SIGKILL)] if patient else []
            elif failed is not None and stopping is None:
                stopping = failed
                self._tell_others(failed, alive)
                # They end by themselves, with what they waited for, within 10 % of the failure timeout. If it was
                # they who noticed, by a silence that took 60 %, that time is nearly over.
                timeout = self._job.failure_timeout
                patience = (0.13 if failed.status == PEER_FAILED_STATUS else 0.3) * timeout
                deadlines = [(now + patience, signal.SIGTERM), (now + patience + 0.05 * timeout, signal.SIGKILL)]
            if not alive:
                return self._better(stopping)
            while deadlines and now >= deadlines[0][0]:
                _, number = deadlines.pop(0)
                stopping = self._blame_stopped(stopping, alive)
                self._signal(alive, number)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> _Cause | None:
        """Notice the ends of processes; returns the first failure among those that are new."""
        found: _Cause | None = None
        for process in self._processes:
            if process.status is not None or process.popen.poll() is None:
                continue
            process.status = process.popen.returncode
            # What it has started and not ended itself is ended with it, and before its number is used again.
            _kill_group(process.popen.pid)
            self._tell_guard("-", process.popen.pid)
            process.control.close()
            if process.status != 0 and (found is None or found.status == PEER_FAILED_STATUS):
                found = self._cause(process)
        unfinished = any(process.status is None for process in self._processes)
        # Without its service JAX aborts a process, which may be noticed first.
        suspected = unfinished if found is None else found.status == _exit_status(-signal.SIGABRT)
        if suspected and self._service is not None and self._service.poll() is not None:
            status = self._service.returncode
            text = f"the coordination service {_how(status)}. JAX ends all processes without it."
            found = _Cause(None, text, _exit_status(status) or 1)
        return found

    def _cause(self, process: _Process) -> _Cause:
        status = process.status or 0
        text = f"process {process.index} of {self._job.num_processes} failed first: it {_how(status)}."
        if status == PEER_FAILED_STATUS:
            text = f"process {process.index} of {self._job.num_processes} was the first to end because of another one."
        return _Cause(process.index, text, _exit_status(status))

    def _better(self, cause: _Cause | None) -> _Cause | None:
        """The true cause, if what was seen first is only a process that ended because of another."""
        if cause is None or cause.status != PEER_FAILED_STATUS:
            return cause
        for process in self._processes:
            if process.status not in (0, PEER_FAILED_STATUS, -signal.SIGTERM, -signal.SIGKILL):
                return self._cause(process)
        return cause

    def _blame_stopped(self, cause: _Cause | None, alive: Sequence[_Process]) -> _Cause | None:
        """A process that stands still cannot say so itself, and the others have ended because of it."""
        if cause is not None and cause.status != PEER_FAILED_STATUS:
            return cause
        for process in alive:
            if _is_stopped(process.popen.pid):
                text = f"process {process.index} of {self._job.num_processes} was stopped (SIGSTOP), and then killed."
                return _Cause(process.index, text, 128 + signal.SIGSTOP)
        return cause

    def _tell_others(self, cause: _Cause, alive: Sequence[_Process]) -> None:
        if cause.status == PEER_FAILED_STATUS:
            return  # it was told by the others
        subject = "-" if cause.index is None else str(cause.index)
        how = cause.message if cause.index is None else cause.message.partition("failed first: ")[2].rstrip(".")
        for process in alive:
            with contextlib.suppress(OSError):
                process.control.write(f"{subject} {how}\n".encode())

    def _signal(self, processes: Sequence[_Process], number: int) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, number)

    def _tell_guard(self, sign: str, group: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._guard.stdin is not None:
                self._guard.stdin.write(f"{sign}{group}\n")
                self._guard.stdin.flush()

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        for process in self._processes:
            if process.status is None:
                _kill_group(process.popen.pid)
                process.popen.wait()
                process.control.close()
        if self._service is not None:
            _kill_group(self._service.pid)
            self._service.wait()
            if self._service.stdin is not None:
                self._service.stdin.close()
        if self._guard.stdin is not None:
            # All groups are gone; their numbers may belong to others from now on.
            self._guard.kill()
            self._guard.stdin.close()
            self._guard.wait()
        self._reserved.close()


def child_environment(
    environment: Mapping[str, str], settings: LaunchSettings, devices_per_process: int
) -> dict[str, str]:
    """The environment of one process.

    Args:
      environment: the launcher's own.
      settings: the process's place.
      devices_per_process: how many devices it is to have.

    Example:
      >>> settings = LaunchSettings(coordinator_address="127.0.0.1:4000", num_processes=2, process_id=1)
      >>> child = child_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, settings, 2)
      >>> child["JAX_NUM_CPU_DEVICES"], child["JAX_LOCAL_DEVICE_IDS"], child["XLA_FLAGS"]
      ('2', '2,3', '')
    """
    first = settings.process_id * devices_per_process
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", environment.get("XLA_FLAGS", "")).strip()
    proxies: dict[str, str] = {}
    if any(name.lower().endswith("_proxy") for name in environment):
        # gRPC would look for this machine behind the proxy.
        known = environment.get("no_proxy", environment.get("NO_PROXY", ""))
        proxies = dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, [known, settings.bind_address])))
    return {
        **environment,
        **settings.to_environment(),
        "JAX_NUM_CPU_DEVICES": str(devices_per_process),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + devices_per_process))),
        "XLA_FLAGS": flags,
        **proxies,
    }


def _reserve_port(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reserved = socket.socket(family)
    try:
        # Both holders must say so for two sockets to share a port; JAX's service does.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise LaunchError(f"--address {address}: this machine cannot listen there: {error}") from error
    return reserved


@contextlib.contextmanager
def _handled_signals() -> Generator[_Signals]:
    signals = _Signals()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under `nohup` the run outlives its terminal
        numbers.append(signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, signals) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    """Whether a process stands still by a signal; False where the system does not tell."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _how(status: int) -> str:
    return f"was killed by {_name(-status)}" if status < 0 else f"ended with exit status {status}"


def _exit_status(status: int) -> int:
    return 128 - status if status < 0 else status
