"""Finish a save that is under way when the program ends, and say so."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Protocol

from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes.waits import print_notice


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
    if writer.is_writing():
        print_notice("the program ends when the checkpoint that is being written is complete")
    try:
        writer.wait()
    except Exception as error:
        print_notice(f"a checkpoint that was being written when the program ended is lost: {error}")
