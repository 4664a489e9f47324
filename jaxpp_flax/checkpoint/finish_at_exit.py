"""Finish a save that is under way when the program ends: in bounded time, and with a message."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Protocol

from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes.waits import print_notice

EXIT_SECONDS = 300.0  # the time that the end of a program waits for a save
ABANDONED_STATUS = 1  # the exit status if this time was not enough
_SECONDS_IN_SILENCE = 2.0


class Writer(Protocol):
    """An object that writes in the background."""

    def is_writing(self) -> bool: ...
    def wait(self) -> None: ...


def finish_at_exit(writer: Writer) -> None:
    """At the end of the program, wait until `writer` has written its checkpoints."""
    reference = weakref.ref(writer)
    # `atexit` comes too late: Python then accepts no new work for threads, but Orbax's background threads need it.
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        warn_user(
            f"Python {sys.version.split()[0]} cannot finish a background save at the end of a program. Call "
            "`trainer.save()` or wait for the last one: a save without wait=False.",
        )
        return
    register(lambda: _finish(reference()))


def _finish(writer: Writer | None) -> None:
    if writer is None:
        return
    begin = time.monotonic()
    told = False
    while writer.is_writing():
        waited = time.monotonic() - begin
        if waited > _SECONDS_IN_SILENCE and not told:
            told = True
            print_notice(
                f"the program ends, and waits at most {EXIT_SECONDS:.0f} s for a checkpoint that is being written"
            )
        if waited > EXIT_SECONDS:
            print_notice(
                f"after {EXIT_SECONDS:.0f} s a checkpoint is still being written: it is abandoned, and is incomplete"
            )
            sys.stdout.flush()
            os._exit(ABANDONED_STATUS)  # Python would wait for the writing threads without a limit
        time.sleep(0.01)
    try:
        writer.wait()
    except Exception as error:
        print_notice(f"a checkpoint that was being written when the program ended is lost: {error}")
