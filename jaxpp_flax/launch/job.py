"""A job: what to start, as the command line describes it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpp_flax import _compat
from jaxpp_flax.launch.settings import LaunchError
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT

__all__ = ["LOOPBACK", "Job", "check_module"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to start: the options of the command line, as `cli.py` describes them.

    The program is a file's path, or "-m" and a module's name; then its arguments. The processes are those of a host.
    """

    program: Sequence[str]
    num_processes: int
    devices_per_process: int = 1
    address: str | None = LOOPBACK
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


def check_module(program: Sequence[str]) -> None:
    """Refuse a module that this machine does not have; for a program that is a script, do nothing.

    Raises:
      LaunchError: naming the module.

    Example:
      >>> check_module(["-m", "timeit", "pass"])
    """
    if program[0] == "-m" and not _has_module(program[1]):
        package = program[1].partition(".")[0] or program[1]
        raise LaunchError(f"there is no module {package!r} to run, neither in {os.getcwd()} nor installed.")


def _has_module(name: str) -> bool:
    """Return whether a process will find a module. Of a package only the package is looked for: nothing is imported."""
    package = name.partition(".")[0]
    if package in sys.modules:
        return True
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())  # as `child.run_program` does
    try:
        return bool(package) and importlib.util.find_spec(package) is not None
    finally:
        sys.path[:] = before
