"""Ctrl-C in `fit`: the step is finished first, since a step reuses the state's memory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxpp_flax.processes.waits import print_notice
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord

__all__ = ["STEPS_AHEAD", "Interruption"]

STEPS_AHEAD = 4
"""A process is fewer steps than this ahead of another one, since each waits for the loss of two steps ago."""


class Interruption(Callback):
    """Delays Ctrl-C: the first one within a step is raised after the step; a second one, or one elsewhere, at once.

    It is raised in `on_step`: the step's metrics, which would be lost otherwise, are noted then.

    With several processes, the first Ctrl-C is not raised but `requested`, so that all of them end after the same step.

    Three cases do not change: the user's own handler, a program that ignores Ctrl-C (a script started it in the
    background), and a thread other than the main thread.

    Args:
      raises: True raises the first Ctrl-C here.

    Example:
      >>> import signal
      >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any Python that a user starts
      >>> try:
      ...     with Interruption() as interruption:
      ...         with interruption.step():
      ...             signal.raise_signal(signal.SIGINT)
      ...         print("the step is finished")
      ...         interruption.on_step(None, None)
      ... except KeyboardInterrupt:
      ...     print("and then fit ends")
      the step is finished
      and then fit ends
      >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self, *, raises: bool = True) -> None:
        super().__init__()
        self.within_step = False
        """True if a step has begun and has not ended."""
        self.requested = False
        """True if Ctrl-C has been pressed."""
        self.repeated = False
        """True if it was pressed again, to end the run at once."""
        self._raises, self._installed = raises, False

    def __enter__(self) -> Interruption:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._receive)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    @contextmanager
    def step(self) -> Generator[None]:
        """The context manager to enter around a step."""
        self.within_step = True
        yield
        self.within_step = False  # stays True after an error: the state may be lost

    def on_step(self, trainer: Any, record: StepRecord | None) -> None:
        """Raise the Ctrl-C that came within the step."""
        if self.requested and self._raises:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.repeated = self.requested
        if self.requested or (self._raises and not self.within_step):
            signal.default_int_handler(number, frame)
        self.requested = True
        end = "after this step" if self._raises else f"in all processes within {STEPS_AHEAD} steps"
        print_notice(f"Ctrl-C ends the run {end}; a second one ends it at once")
