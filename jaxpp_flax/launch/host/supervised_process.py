"""A process of a run as its host sees it: its messages, and its end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from dataclasses import dataclass

from jaxpp_flax.launch.host.progress import Progress
from jaxpp_flax.launch.host.signals import is_stopped, kill_group, signal_group
from jaxpp_flax.launch.host.warm import Forked

__all__ = ["ProcessState", "SupervisedProcess"]


@dataclass(frozen=True)
class ProcessState:
    """What a host tells of one of its processes.

    Attributes:
      index: of the process in the run.
      status: as `Popen.returncode`, once it has ended.
      first, last: the first and the furthest step that it has begun; 0: none.
      is_from_memory: whether its state came from a copy in memory.
      connected: whether it has come to all others. Before, it has nothing to save, JAX may hold it, and it may miss
        that another one was stopped.
      over: the exit status that its program announced once it was over: the other processes need nothing of it.
      is_stopped: whether a signal has stopped it.
    """

    index: int
    status: int | None = None
    first: int = 0
    last: int = 0
    is_from_memory: bool = False
    connected: bool = False
    over: int | None = None
    is_stopped: bool = False


@dataclass
class SupervisedProcess:
    """One process of the run.

    Attributes:
      control: the host's end of the connection to it.
      progress: the steps that it has begun.
      connected, status, over: as in `ProcessState`.
    """

    index: int
    popen: subprocess.Popen[bytes] | Forked
    control: socket.socket
    progress: Progress
    connected: bool = False
    status: int | None = None
    over: int | None = None

    def look(self) -> ProcessState:
        """Read its messages, and notice its end."""
        with contextlib.suppress(OSError):  # nothing has come, or it has ended
            for line in self.control.recv(4096).decode(errors="replace").splitlines():
                if line == "connected":
                    self.connected = True
                elif line.startswith("over "):
                    self.over = int(line.removeprefix("over "))
        if self.status is None and self.popen.poll() is not None:
            self.status = self.popen.returncode
            # End the processes that it has started too, before the system uses its number again.
            kill_group(self.popen.pid)
        stopped = self.status is None and is_stopped(self.popen.pid)
        steps = self.progress.first, self.progress.last, self.progress.is_from_memory
        return ProcessState(self.index, self.status, *steps, self.connected, self.over, stopped)

    def tell(self, line: str) -> None:
        """Send one line to it."""
        with contextlib.suppress(OSError):
            self.control.send(f"{line}\n".encode())

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started."""
        signal_group(self.popen.pid, number)

    def close(self) -> None:
        """Give up what is kept of it."""
        self.control.close()
        self.progress.close()
