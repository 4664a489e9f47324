"""Ctrl-C in `fit`: the step is finished first, since within it the state's memory changes hands."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from jaxpp_flax.processes.waits import print_notice

__all__ = ["Interruption"]


class Interruption:
    """While entered, the first Ctrl-C within a step is raised after it; a second one, or one elsewhere, at once.

    One of several processes never raises the first one: it is `requested`, so that all of them end after the same step.

    A handler of the user's own is left alone, as is a program that ignores Ctrl-C (one that a script has started in the
    background), and a thread other than the main one.

    Args:
      raises: whether the first one is raised here.

    Example:
      >>> import signal
      >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any Python that a user starts
      >>> try:
      ...     with Interruption() as interruption, interruption.step():
      ...         signal.raise_signal(signal.SIGINT)
      ...         print("the step is finished")
      ... except KeyboardInterrupt:
      ...     print("and then fit ends")
      the step is finished
      and then fit ends
      >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self, *, raises: bool = True) -> None:
        self.within_step = False
        """Whether a step has begun and has not ended."""
        self.requested = False
        """Whether Ctrl-C has been pressed."""
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
        """Around a step."""
        self.within_step = True
        yield
        self.within_step = False  # after an error it stays: the state may be lost
        if self.requested and self._raises:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested or (self._raises and not self.within_step):
            signal.default_int_handler(number, frame)
        self.requested = True
        print_notice("Ctrl-C ends the run after this step; a second one ends it at once")
