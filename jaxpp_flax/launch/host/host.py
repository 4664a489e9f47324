"""The processes of one host, from the start of each to its end, and the coordination service of the run."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.host.progress import Progress
from jaxpp_flax.launch.host.signals import is_stopped, kill_group, signal_group
from jaxpp_flax.launch.host.supervised_process import ProcessState, SupervisedProcess
from jaxpp_flax.launch.host.warm import Forked, WarmInterpreter, inherited
from jaxpp_flax.launch.settings import LaunchSettings, device_environment, join_host_and_port

__all__ = ["Host", "HostReport", "child_environment"]

Follow = Callable[[int, IO[str], bool], None]


@dataclass(frozen=True)
class HostReport:
    """What a host tells of its processes, and of the coordination service of the run.

    Attributes:
      processes: those of this life of the run.
      service: the exit status of the service, if it has ended here.
      service_is_stopped: whether a signal has stopped it here.
    """

    processes: tuple[ProcessState, ...] = ()
    service: int | None = None
    service_is_stopped: bool = False


class Host:
    """Starts the processes of this host, hears what they tell, and ends them. It outlives each life of the run.

    The launcher owns one; in a run over several hosts, an actor on each host owns one.

    Args:
      program: a file's path, or "-m" and a module's name; then its arguments.
      devices_per_process: virtual devices on CPU, else accelerators.
      forks: whether the processes are forks of one interpreter with the imports. Else each imports by itself.
      address: of this host, where the coordination service listens.
      follow: reads the output of a process: its index, a stream, and whether that has errors.
      signals: grows when the user wants the end of the run; then no more forks are made.
      keeps_state: whether the processes may leave copies of their state to those of the next life. They lie in a file
        in memory without a name, so nothing is left of them once this process and those that it has started end.
      link: takes this host's end of a connection to each process, which asks there for copies at other hosts. None:
        there is one host.

    Attributes:
      memory: descriptor of the file in memory; None if nothing is kept.
      name: of this host, for messages; empty if there is no other one.
      lost: why this host is lost; None: it is there.
      address: where the coordination service of this life of the run may listen; after `prepare`.
    """

    name = ""
    lost: str | None = None

    def __init__(
        self,
        program: Sequence[str],
        devices_per_process: int,
        *,
        forks: bool,
        address: str,
        follow: Follow,
        signals: Sequence[int] = (),
        keeps_state: bool = False,
        link: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._program, self._devices, self._ip, self._follow = program, devices_per_process, address, follow
        self._signals, self._link = signals, link
        self._warm = WarmInterpreter(signals) if forks else None
        keeps = keeps_state and sys.platform.startswith("linux")  # no other system has such files
        self.memory = os.memfd_create("jaxpp_flax") if keeps else None
        self._processes: list[SupervisedProcess] = []
        # In a process of its own, beside no program.
        self._service: subprocess.Popen[bytes] | Forked | None = None
        self._kept: list[int] = []
        self._reserved: socket.socket | None = None
        self.address = ""

    def prepare(self) -> None:
        """Hold a port for the coordination service, also after this has taken it: no other program gets it."""
        self._reserved = coordinator.reserve_port(self._ip)
        self.address = join_host_and_port(self._ip, self._reserved.getsockname()[1])

    def serve(self, settings: LaunchSettings) -> None:
        """Start the coordination service of this life of the run, at the address in the settings."""
        arguments = coordinator.arguments(settings, linger=settings.failure_timeout)
        reading, writing = os.pipe()  # the service ends with this process
        self._kept.append(writing)
        with open(os.devnull, "r+b") as nothing, open(reading, "rb"):
            descriptors = {0: reading, 1: nothing.fileno(), 2: nothing.fileno()}
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            self._service = self._spawn("jaxpp_flax.launch.coordinator", arguments, environment, descriptors)

    def start(self, settings: LaunchSettings) -> None:
        """Start one process of the run."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        progress = Progress()
        pipes = [os.pipe(), os.pipe()]
        streams = [os.fdopen(reading, errors="replace") for reading, _ in pipes]
        with contextlib.ExitStack() as given, theirs, open(os.devnull, "rb") as nothing:
            control, page = inherited(theirs.fileno()), inherited(progress.descriptor)
            out, errors = (writing for _, writing in pipes)
            for descriptor in (control, page, out, errors):
                given.callback(os.close, descriptor)
            descriptors = {0: nothing.fileno(), 1: out, 2: errors, control: control, page: page}
            settings = replace(settings, control_fd=control, progress_fd=page)
            for name, descriptor in self._memory_descriptors(given).items():
                settings, descriptors[descriptor] = replace(settings, **{name: descriptor}), descriptor
            environment = child_environment(os.environ, settings, len(self._processes), self._devices)
            popen = self._spawn("jaxpp_flax.launch.child", self._program, environment, descriptors)
        self._processes.append(SupervisedProcess(settings.process_id, popen, ours, progress))
        for has_errors, stream in enumerate(streams):
            self._follow(settings.process_id, stream, bool(has_errors))

    def _memory_descriptors(self, given: contextlib.ExitStack) -> dict[str, int]:
        """Open what a process needs for copies of its state, by the name of the setting; `given` closes it here."""
        if self.memory is None:
            return {}
        descriptors = {"memory_fd": inherited(self.memory)}
        if self._link is not None:
            ours, theirs = socket.socketpair()
            with theirs:
                descriptors["memory_link_fd"] = inherited(theirs.fileno())
            self._link(ours)
        for descriptor in descriptors.values():
            given.callback(os.close, descriptor)
        return descriptors

    def _spawn(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> subprocess.Popen[bytes] | Forked:
        if self._warm is not None:
            if self._warm.has_ended:  # what it has forked lives on, and ends like any process
                self._warm = WarmInterpreter(self._signals)
            return self._warm.fork(module, arguments, environment, descriptors)
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=descriptors[0],
            stdout=descriptors[1],
            stderr=descriptors[2],
            env=environment,
            pass_fds=[number for number in descriptors if number > 2],
            process_group=0,
        )

    def poll(self) -> HostReport:
        """What has become of the processes."""
        # A process that loses the service ends: who looks at the service last misses no reason.
        states = tuple(process.look() for process in self._processes)
        if self._service is None:
            return HostReport(states)
        status = self._service.poll()
        return HostReport(states, status, status is None and is_stopped(self._service.pid))

    def tell(self, line: str) -> None:
        """Send one line to each living process."""
        for process in self._processes:
            if process.status is None:
                process.tell(line)

    def signal(self, index: int | None, number: int) -> None:
        """Send a signal to a process, and to those that it has started, if it lives; None is the service."""
        if index is None and self._service is not None and self._service.poll() is None:
            signal_group(self._service.pid, number)
        for process in self._processes:
            if process.index == index and process.status is None:
                process.signal(number)

    def end(self) -> None:
        """End this life of the run: nothing of it is left."""
        for process in self._processes:
            if process.status is None:
                kill_group(process.popen.pid)
                process.popen.wait()
            process.close()
        if self._service is not None:
            kill_group(self._service.pid)
            self._service.wait()
        for descriptor in self._kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._reserved is not None:
            self._reserved.close()
        self._processes, self._service, self._kept, self._reserved = [], None, [], None

    def has_ended(self) -> bool:
        """Whether `end` has done all."""
        return True

    def close(self) -> None:
        """End all that there is."""
        self.end()
        if self._warm is not None:
            self._warm.close()
        if self.memory is not None:
            os.close(self.memory)


def child_environment(
    environment: Mapping[str, str], settings: LaunchSettings, place: int, devices_per_process: int
) -> dict[str, str]:
    """The environment of one process, made from the launcher's own; its place is its number on this host.

    Example:
      >>> settings = LaunchSettings(coordinator_address="127.0.0.1:4000", num_processes=4, process_id=3)
      >>> child = child_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, settings, 1, 2)
      >>> child["JAX_NUM_CPU_DEVICES"], child["JAX_LOCAL_DEVICE_IDS"], child["XLA_FLAGS"]
      ('2', '2,3', '')
      >>> child["COLUMNS"]  # "[3] " stands before each line
      '76'
    """
    first = place * devices_per_process
    beside = int(environment.get("COLUMNS") or 80) - len(f"[{settings.num_processes - 1}] ")
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
        "COLUMNS": str(beside),
        **proxies,
    }
