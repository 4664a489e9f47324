"""The signals that ask a launcher to end its run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

__all__ = ["Signals", "handled_signals"]


@dataclass
class Signals:
    """The signals that this process has received, in order."""

    received: list[int] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


@contextlib.contextmanager
def handled_signals() -> Generator[Signals]:
    """Inside, Ctrl-C, SIGTERM and a hangup are recorded, and do nothing else."""
    signals = Signals()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under `nohup` the run outlives its terminal
        numbers.append(signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, signals) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
