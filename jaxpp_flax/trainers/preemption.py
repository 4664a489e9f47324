"""Preemption: SIGTERM asks `fit` to finish its step, save and end."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["KILLED_STATUS", "PREEMPTED_STATUS", "Preemption"]

PREEMPTED_STATUS = 75
"""Exit status after SIGTERM, once the checkpoint is complete: start the program again and it goes on from there."""

KILLED_STATUS = 143
"""Exit status of a second SIGTERM, or of a save that missed the deadline: the checkpoint before is the latest."""


class Preemption:
    """While entered, the first SIGTERM is noted; a second one, or the deadline after the first, ends the process.

    Nothing is installed outside of the main thread, where Python takes no signals, or without a deadline.

    Args:
      deadline: seconds from the first signal to the end, or None to leave signals alone.

    Example:
      >>> import os, signal
      >>> with Preemption(60.0) as preemption:
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     preemption.requested
      True
    """

    def __init__(self, deadline: float | None) -> None:
        self.requested = False
        self._deadline = deadline
        self._before: Any = None
        self._installed = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Preemption:
        if self._deadline is not None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._receive)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            self._installed = False
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(KILLED_STATUS)
        self.requested = True
        self._timer = threading.Timer(self._deadline or 0.0, os._exit, (KILLED_STATUS,))
        self._timer.daemon = True
        self._timer.start()
