"""The settings of a run that its launcher gives to each process, through an environment variable."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxpp_flax.error_codes import documented
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT

__all__ = [
    "LaunchError",
    "LaunchSettings",
    "compilation_cache",
    "describe_preemption",
    "device_environment",
    "join_host_and_port",
]

_VARIABLE = "JAXPP_FLAX_LAUNCH"


@documented("JPF506")
class LaunchError(RuntimeError):
    """The processes cannot be started as requested, cannot connect to one another, or one of them failed."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """One process's place in a run.

    Args:
      coordinator_address: host and port of the coordination service, which the launcher serves.
      num_processes: how many processes there are.
      process_id: the index of this process, from 0.
      bind_address: the address that this process's own sockets listen on.
      failure_timeout: seconds within which a failure anywhere has ended every process.
      control_fd: descriptor of a connection to the launcher: a line from there is a failure of another process, its
        end is the launcher's end; "connected" says that it is connected to all others, "over 0" that its program is
        over, and its status. None if there is no launcher.
      progress_fd: descriptor of the page where this process notes its steps; None if there is no launcher.
      memory_fd: descriptor of the file in memory where processes keep copies of their state for the next life of the
        run; None if there will be none.
      memory_link_fd: descriptor of a connection to this process's host, which copies what is in that file to and from
        other hosts; None if the run has one host.
      processes_per_host: how many of the processes each host has, if there are several.
      run_id: names the run, and no other one; "" if nobody has named it.
      attempt: how often the processes of the run have been started, from 1.

    Example:
      >>> settings = LaunchSettings(coordinator_address="127.0.0.1:4000", num_processes=2, process_id=1)
      >>> LaunchSettings.from_environment(settings.to_environment()) == settings
      True
      >>> LaunchSettings.from_environment({}) is None
      True
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    bind_address: str | None = None
    failure_timeout: float = DEFAULT_FAILURE_TIMEOUT
    control_fd: int | None = None
    progress_fd: int | None = None
    memory_fd: int | None = None
    memory_link_fd: int | None = None
    processes_per_host: int = 1
    run_id: str = ""
    attempt: int = 1

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise LaunchError(f"num_processes={self.num_processes}: at least one process is needed.")
        if not 0 <= self.process_id < self.num_processes:
            raise LaunchError(
                f"process_id={self.process_id}: in a run of {self.num_processes} processes, it must be 0 to "
                f"{self.num_processes - 1}."
            )
        if not self.failure_timeout > 0:
            raise LaunchError(f"failure_timeout={self.failure_timeout}: it must be a number of seconds above 0.")
        if ":" not in self.coordinator_address:
            raise LaunchError(f"coordinator_address={self.coordinator_address!r}: it must be 'host:port'.")

    def for_every_process(self) -> list[LaunchSettings]:
        """These settings for each process of the run, in order."""
        return [replace(self, process_id=index) for index in range(self.num_processes)]

    def to_environment(self) -> dict[str, str]:
        """These settings as an environment variable."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LaunchSettings | None:
        """The settings in the environment variable, or None if no launcher has set it."""
        if _VARIABLE not in environment:
            return None
        try:
            return cls(**json.loads(environment[_VARIABLE]))
        except (TypeError, ValueError) as error:
            raise LaunchError(
                f"the environment variable {_VARIABLE} is incomplete or wrong ({error}). It is set by the launcher; "
                "unset it to run without one."
            ) from error


def join_host_and_port(host: str, port: int | str) -> str:
    """An address in one text; an IP address of version 6 stands in brackets.

    >>> join_host_and_port("127.0.0.1", 4000), join_host_and_port("::1", 4000)
    ('127.0.0.1:4000', '[::1]:4000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def device_environment(environment: Mapping[str, str], devices_per_process: int) -> dict[str, str]:
    """The environment variables that give a process its number of virtual devices on CPU.

    A number of devices in the launcher's own `XLA_FLAGS` would count for each process. XLA takes the number of its
    threads from `NPROC`, else from the cores. A collective holds a thread for each device until all of them arrive:
    with too few threads, and other work in between, the run hangs.

      >>> device_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 1)
      {'JAX_NUM_CPU_DEVICES': '1', 'XLA_FLAGS': ''}
      >>> int(device_environment({}, 4)["NPROC"]) >= 16
      True
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", environment.get("XLA_FLAGS", "")).strip()
    found = {"JAX_NUM_CPU_DEVICES": str(devices_per_process), "XLA_FLAGS": flags}
    if devices_per_process > 1:
        found["NPROC"] = environment.get("NPROC") or str(max(4 * devices_per_process, os.cpu_count() or 1))
    return found


def compilation_cache(environment: Mapping[str, str]) -> Path | None:
    """The directory where the processes of this host keep what they compile; None: the user has chosen, or no home.

    A home may be shared, and a host's programs for its CPU need not run on another one: each host has its own folder.

      >>> directory = compilation_cache({"XDG_CACHE_HOME": "/var/cache"})
      >>> directory == Path("/var/cache/jaxpp_flax/compiled", socket.gethostname())
      True
      >>> compilation_cache({"JAX_COMPILATION_CACHE_DIR": "/scratch"}) is None
      True
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment:
        return None
    try:
        caches = environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:  # as in a container whose user has no entry, and no HOME
        return None
    return Path(caches, "jaxpp_flax", "compiled", socket.gethostname())


def describe_preemption(num_processes: int) -> str:
    """The message after SIGTERM, once all processes have saved.

    >>> describe_preemption(1)
    'preempted: the process has saved after SIGTERM. Start the run again: fit(resume=True) goes on from there.'
    """
    processes = "the process has" if num_processes == 1 else f"all {num_processes} processes have"
    return f"preempted: {processes} saved after SIGTERM. Start the run again: fit(resume=True) goes on from there."
