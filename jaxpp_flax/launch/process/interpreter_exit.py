"""Between the end of a program and that of its process, Python waits for threads and exit handlers: in bounded time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

__all__ = ["LEAVING_SECONDS", "Leaving"]

LEAVING_SECONDS = 600.0
"""How long the end of a program waits for its threads and exit handlers: twice what a save may take there."""

_SECONDS_IN_SILENCE = 10.0


class Leaving:
    """Looks whether a process whose program is over comes to its end.

    A thread that is no daemon keeps Python from ending, and all other processes wait for this one then.

    Args:
      process: its index.
      end: called with the reason, in a background thread, where the process takes too long.
    """

    def __init__(self, process: int, end: Callable[[str], None]) -> None:
        self._process, self._end = process, end
        self._left = threading.Event()

    def begin(self) -> None:
        """The program is over."""
        threading.Thread(target=self._watch, name="jaxpp_flax leaving", daemon=True).start()

    def finish(self) -> None:
        """The process has come to its end."""
        self._left.set()

    def _watch(self) -> None:
        begun = time.monotonic()
        if self._left.wait(_SECONDS_IN_SILENCE):
            return
        text = f"the program of process {self._process} is over, but {_what_holds_it()}"
        print(
            f"jaxpp_flax: {text}. The other processes wait for it; after {LEAVING_SECONDS:g} s it ends.",
            file=sys.stderr,
            flush=True,
        )
        if not self._left.wait(LEAVING_SECONDS - (time.monotonic() - begun)):
            self._end(f"{text}, for {LEAVING_SECONDS:g} s")


def _what_holds_it() -> str:
    names = [thread.name for thread in threading.enumerate() if not thread.daemon]
    others = [name for name in names if name != threading.main_thread().name]
    if not others:
        return "an exit handler of it (`atexit`) still runs"
    listed = ", ".join(map(repr, others))
    return (
        f"its thread{'s' if len(others) > 1 else ''} {listed} still run{'' if len(others) > 1 else 's'} (daemon=False)"
    )
