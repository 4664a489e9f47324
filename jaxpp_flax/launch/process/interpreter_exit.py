"""The exit of the interpreter after a program is over: it waits for threads and exit handlers, in bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jaxpp_flax.processes.waits import print_notice

__all__ = ["EXIT_SECONDS", "InterpreterExit"]

EXIT_SECONDS = 600.0
"""The limit of the exit, for threads and exit handlers: twice the time that a save may take there."""

_SECONDS_IN_SILENCE = 10.0


class InterpreterExit:
    """Watches the exit of the interpreter, and ends the process if the exit takes too long.

    A thread that is no daemon keeps Python from exiting, and then all other processes wait for this one.

    Args:
      process: the index of this process.
      end: called with the reason, in a background thread, if the exit takes too long.
    """

    def __init__(self, process: int, end: Callable[[str], None]) -> None:
        self._process, self._end = process, end
        self._finished = threading.Event()

    def begin(self) -> None:
        """Start to watch: the program is over."""
        threading.Thread(target=self._watch, name="jaxpp_flax exit", daemon=True).start()

    def finish(self) -> None:
        """Stop to watch: from here on the process waits for the other processes."""
        self._finished.set()

    def _watch(self) -> None:
        begun = time.monotonic()
        if self._finished.wait(_SECONDS_IN_SILENCE):
            return
        text = f"the program of process {self._process} is over, but {_describe_cause()}"
        print_notice(f"{text}. The other processes wait for it; after {EXIT_SECONDS:g} s it ends.")
        if not self._finished.wait(EXIT_SECONDS - (time.monotonic() - begun)):
            self._end(f"{text}, for {EXIT_SECONDS:g} s")


def _describe_cause() -> str:
    names = [thread.name for thread in threading.enumerate() if not thread.daemon]
    others = [name for name in names if name != threading.main_thread().name]
    if not others:
        return "an exit handler of it (`atexit`) still runs"
    listed = ", ".join(map(repr, others))
    return (
        f"its thread{'s' if len(others) > 1 else ''} {listed} still run{'' if len(others) > 1 else 's'} (daemon=False)"
    )
