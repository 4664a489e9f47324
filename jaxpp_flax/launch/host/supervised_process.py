"""A process of a run as its launcher sees it: its messages, and its end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from dataclasses import dataclass

from jaxpp_flax.launch.host.progress import Progress
from jaxpp_flax.launch.host.signals import kill_group
from jaxpp_flax.launch.host.warm import Forked
from jaxpp_flax.processes.failures import PREEMPTED_STATUS

__all__ = ["SupervisedProcess"]


@dataclass
class SupervisedProcess:
    """One process of the run.

    Attributes:
      control: the launcher's end of the connection to it.
      progress: the steps that it has begun.
      connected: whether it has come to all others. Before, it has nothing to save, JAX may hold it, and it may miss
        that another one was stopped.
      status: as `Popen.returncode`, once it has ended.
      over_since: the time when its program was over: from then on the other processes need nothing of it.
      over_status: the exit status that its program announced then.
      is_told: whether the user was told that the launcher waits for it.
      is_overdue: whether it was killed because it did not end after its program.
    """

    index: int
    popen: subprocess.Popen[bytes] | Forked
    control: socket.socket
    progress: Progress
    connected: bool = False
    status: int | None = None
    over_since: float | None = None
    over_status: int = 0
    is_told: bool = False
    is_overdue: bool = False

    @property
    def ended_well(self) -> bool:
        """Whether it has ended, and by no failure."""
        return self.status in (0, PREEMPTED_STATUS)

    def hear(self, now: float) -> None:
        """Read its messages: it is connected, or its program is over."""
        with contextlib.suppress(OSError):  # nothing has come, or it has ended
            for line in self.control.recv(4096).decode(errors="replace").splitlines():
                if line == "connected":
                    self.connected = True
                elif line.startswith("over "):
                    self.over_since, self.over_status = now, int(line.removeprefix("over "))

    def tell(self, line: str) -> None:
        """Send one line to it."""
        with contextlib.suppress(OSError):
            self.control.send(f"{line}\n".encode())

    def reap(self) -> bool:
        """Whether it has ended since the last call."""
        if self.status is not None or self.popen.poll() is None:
            return False
        self.status = self.over_status if self.is_overdue else self.popen.returncode
        # End the processes that it has started too, before the system uses its number again.
        kill_group(self.popen.pid)
        return True

    def close(self) -> None:
        """Give up what is kept of it."""
        self.control.close()
        self.progress.close()

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)
