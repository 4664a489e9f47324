"""Preemption: SIGTERM asks a loop over data to finish its step, save and end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from jaxpp_flax.processes.failures import PREEMPTED_STATUS
from jaxpp_flax.processes.waits import call_with_limit

__all__ = ["KILLED_STATUS", "PREEMPTED_STATUS", "Preemption"]

KILLED_STATUS = 143
"""Exit status after a second SIGTERM, or if the save missed its deadline: this step has no checkpoint."""

# A process may get two signals for one request: one from the scheduler, and one that the launcher passes on.
_ONE_REQUEST = 1.0
# The seconds to ask what is left, and to write it, when the process ends: its disk or its output may hang.
_TO_TELL = 2.0

# Held while signals are passed on: whoever is outside must not close the file descriptor then.
_PASSING_ON = threading.Lock()


class Preemption:
    """Notes the first SIGTERM; a later SIGTERM, or the deadline after the first, ends the process.

    Signals within a second after the first one count as the same request.

    A signal handler notes the first one. A thread ends the process, and gets signals from the interpreter's wakeup
    file descriptor: the main thread may be waiting for devices or another process, and then Python runs no handler.

    Nothing is installed without a deadline, or outside of the main thread, since Python handles signals only there.
    Inside another `Preemption`, as in two loops that run in turn, both note the signal; they may end in any order.

    Args:
      deadline: seconds from the first signal to the end, or None to handle no signals.
      left: returns what to tell of the checkpoints that there are, if the process has to end at once.

    Example:
      >>> import os, signal
      >>> with Preemption(60.0) as preemption:
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     preemption.requested
      True
    """

    def __init__(self, deadline: float | None, left: Callable[[], str] = lambda: "") -> None:
        self.requested = False
        self._deadline, self._left = deadline, left
        self._before: Any = None
        self._is_over = False
        self._watcher: threading.Thread | None = None
        self._read = self._write = self._descriptor_before = -1

    def __enter__(self) -> Preemption:
        if self._deadline is not None and threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._descriptor_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGTERM, self._receive)
            self._watcher = threading.Thread(target=self._watch, args=(self._deadline,), daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watcher is None:
            return
        if threading.current_thread() is not threading.main_thread() or not self._uninstall():
            self._is_over = True  # the handler stays, and passes signals on
            return
        os.close(self._write)  # ends the thread
        self._watcher.join()
        os.close(self._read)
        self._watcher = None

    def _uninstall(self) -> bool:
        """Take this one out, from inside of those that began later too; False if the program has its own handler."""
        handler = signal.getsignal(signal.SIGTERM)
        if handler == self._receive:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(self._descriptor_before)
            return True
        while isinstance(inner := getattr(handler, "__self__", None), Preemption):
            handler = inner._before
            if handler == self._receive:
                with _PASSING_ON:
                    inner._before = self._before
                    if inner._descriptor_before == self._write:
                        inner._descriptor_before = self._descriptor_before
                return True
        return False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
            return
        self.requested = True
        outer = getattr(self._before, "__self__", None)
        if isinstance(outer, Preemption) and not outer._is_over:
            self._before(number, frame)

    def _watch(self, deadline: float) -> None:
        end, first = None, 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while True:
                if not selector.select(None if end is None else max(0.0, end - time.monotonic())):
                    if self._is_over:
                        end = None
                        continue
                    return self._end(
                        f"the step and its save were not complete within {deadline:g} s "
                        "(Checkpoints(preemption_deadline=))"
                    )
                numbers = os.read(self._read, 64)
                if not numbers:
                    return None
                with _PASSING_ON, contextlib.suppress(OSError):
                    if self._descriptor_before >= 0:  # an event loop's, which reads nothing now
                        os.write(self._descriptor_before, numbers)
                if signal.SIGTERM not in numbers or self._is_over:  # the loop has ended, and the program goes on
                    continue
                now = time.monotonic()
                if end is None:
                    first, end = now, now + deadline
                elif now - first > _ONE_REQUEST:
                    return self._end("it came a second time, before the step and its save were complete")

    def _end(self, why: str) -> None:
        """End the process, and say so first: its output, or a disk that it asks, may hang."""
        left: list[str] = []
        call_with_limit(lambda: left.append(self._left()), _TO_TELL)
        line = f"jaxpp_flax: SIGTERM: {why}; exiting with status {KILLED_STATUS}. {''.join(left)}".rstrip()

        def tell() -> None:
            os.write(2, f"{line}\n".encode())  # not by `print`: the main thread may hold its lock

        call_with_limit(tell, _TO_TELL)
        os._exit(KILLED_STATUS)
