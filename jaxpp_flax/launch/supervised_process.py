"""A process of a run as its launcher sees it: its messages, its end, and the signals that end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jaxpp_flax.processes.failures import PREEMPTED_STATUS

__all__ = ["SupervisedProcess", "describe_end", "exit_status", "is_stopped", "kill_group", "signal_name"]


@dataclass
class SupervisedProcess:
    """One process of the run.

    Attributes:
      index: its index in the run.
      popen: the process of the operating system.
      control: the launcher's end of the connection to it.
      status: as `Popen.returncode`, once it has ended.
      over_since: the time when its program was over: from then on the other processes need nothing of it.
      over_status: the exit status that its program announced then.
      is_told: whether the user was told that the launcher waits for it.
      is_overdue: whether it was killed because it did not end after its program.
    """

    index: int
    popen: subprocess.Popen[str]
    control: socket.socket
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
        """Read its messages: one says that its program is over."""
        with contextlib.suppress(OSError):  # nothing has come, or it has ended
            for line in self.control.recv(4096).decode(errors="replace").splitlines():
                if line.startswith("over "):
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
        self.control.close()
        return True

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def kill_group(group: int) -> None:
    """Kill a group of processes, if there still is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process; False where the system does not tell."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def signal_name(number: int) -> str:
    """
    >>> signal_name(15), signal_name(99)
    ('SIGTERM', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(status: int) -> str:
    """A return code in words.

    >>> describe_end(-9), describe_end(3)
    ('was killed by SIGKILL', 'ended with exit status 3')
    """
    return f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit status {status}"


def exit_status(status: int) -> int:
    """A return code as a shell gives it.

    >>> exit_status(-9), exit_status(3)
    (137, 3)
    """
    return 128 - status if status < 0 else status
