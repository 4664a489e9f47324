"""What whoever starts processes tells each of them, through environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT

__all__ = ["LaunchError", "LaunchSettings"]

_PREFIX = "JAXPP_FLAX_LAUNCH_"


class LaunchError(RuntimeError):
    """Processes cannot be started as was asked, or do not find each other."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """One process's place in a run.

    Args:
      coordinator_address: host and port of the coordination service, which whoever starts the processes serves.
      num_processes: how many processes there are.
      process_id: which of them this one is, from 0.
      bind_address: the address that this process's own sockets listen on.
      failure_timeout: seconds within which a failure anywhere has ended every process.
      control_fd: descriptor of a connection to the launcher: a line from there is a failure of another process, its
        end is the launcher's end; "over 0" says that this process's program is over, and its status. None if there is
        no launcher.

    Example:
      >>> settings = LaunchSettings(coordinator_address="127.0.0.1:4000", num_processes=2, process_id=1)
      >>> settings.to_environment()["JAXPP_FLAX_LAUNCH_PROCESS_ID"]
      '1'
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

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise LaunchError(f"num_processes={self.num_processes}: at least one process is needed.")
        if not 0 <= self.process_id < self.num_processes:
            raise LaunchError(
                f"process_id={self.process_id}: of {self.num_processes} processes, it is 0 to {self.num_processes - 1}."
            )
        if not self.failure_timeout > 0:
            raise LaunchError(f"failure_timeout={self.failure_timeout}: it must be a number of seconds above 0.")
        if ":" not in self.coordinator_address:
            raise LaunchError(f"coordinator_address={self.coordinator_address!r}: it must be 'host:port'.")

    def to_environment(self) -> dict[str, str]:
        """The environment variables that say this."""
        values = {
            "COORDINATOR_ADDRESS": self.coordinator_address,
            "NUM_PROCESSES": str(self.num_processes),
            "PROCESS_ID": str(self.process_id),
            "BIND_ADDRESS": self.bind_address or "",
            "FAILURE_TIMEOUT": repr(self.failure_timeout),
            "CONTROL_FD": "" if self.control_fd is None else str(self.control_fd),
        }
        return {_PREFIX + name: value for name, value in values.items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LaunchSettings | None:
        """What the environment variables say, or None if a launcher set none.

        Raises:
          LaunchError: if only some are set, or one has no meaning.
        """
        if not any(name.startswith(_PREFIX) for name in environment):
            return None
        try:
            control = environment[_PREFIX + "CONTROL_FD"]
            return cls(
                coordinator_address=environment[_PREFIX + "COORDINATOR_ADDRESS"],
                num_processes=int(environment[_PREFIX + "NUM_PROCESSES"]),
                process_id=int(environment[_PREFIX + "PROCESS_ID"]),
                bind_address=environment[_PREFIX + "BIND_ADDRESS"] or None,
                failure_timeout=float(environment[_PREFIX + "FAILURE_TIMEOUT"]),
                control_fd=int(control) if control else None,
            )
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"the environment variables {_PREFIX}* are incomplete or wrong ({error}). They are set by "
                "the launcher; unset them all to run without one."
            ) from error
