"""Signals: those that ask a launcher to end its run, and those that end a process or its group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["describe_end", "exit_status", "handled_signals", "is_stopped", "kill_group", "signal_group", "signal_name"]


@contextlib.contextmanager
def handled_signals() -> Generator[list[int]]:
    """Inside, Ctrl-C, SIGTERM and a hangup are recorded in a list, in order, and do nothing else.

    The ends of children are not ignored, as whoever started this process may have set it: their statuses would be lost.
    """
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under `nohup` the run outlives its terminal
        numbers.append(signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, record) for number in numbers}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a group of processes, if there still is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_group(group: int) -> None:
    """Kill a group of processes, if there still is one, as far as this process may."""
    with contextlib.suppress(PermissionError):
        signal_group(group, signal.SIGKILL)


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
