"""How processes wait for each other while they save or restore: in words, and no longer than until one of them fails.

Most of these waits are Orbax's, inside of JAX's coordination service, where no news of a failure comes through: an
error that one process alone has would leave the others there for minutes. So it is told to them, and ends the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.store import ProcessFailedError

__all__ = ["background_barrier", "name_checkpoint", "poll", "report_alone", "shared_work"]

# What Orbax's threads meet for, by a part of the name that it gives to the barrier; the others are its bookkeeping.
_PURPOSES = {"async_write_complete": "every process's part of it", "async_commit_complete": "commit"}


def name_checkpoint(path: Path) -> str:
    """A checkpoint in a few words, for what is waited for.

    Example:
      >>> name_checkpoint(Path("/runs/gpt/40/state")), name_checkpoint(Path("/weights/base"))
      ('step 40', '/weights/base')
    """
    return next((f"step {place.name}" for place in (path, path.parent) if place.name.isdigit()), str(path))


@contextmanager
def shared_work(what: str, described: Callable[[Exception], Exception], *, everywhere: bool = False) -> Generator[None]:
    """Do a part of a save or restore in which processes wait for each other.

    Args:
      what: such as "the save of step 40", for the errors of those who wait in it.
      described: makes the error to raise from the one that came.
      everywhere: whether every process raises whatever one of them does; otherwise the others are told, and all end.

    Example:
      >>> with shared_work("the save of step 40", lambda error: OSError(f"cannot save: {error}")):
      ...     raise ValueError("full")
      Traceback (most recent call last):
          ...
      OSError: cannot save: full
    """
    try:
        with process_group().waiting(what):
            yield
    except ProcessFailedError:
        raise
    except Exception as error:
        new = described(error)
        if not everywhere:
            report_alone(what, new)
        if new is error:
            raise
        raise new from error


def report_alone(what: str, error: BaseException) -> None:
    """Tell all processes of an error of this one, for which they would wait in vain."""
    group = process_group()
    if group.process_count > 1:
        group.report_failure(f"{what} failed in this process, and others wait for it: {error}")


def background_barrier(
    what: Callable[[], str], described: Callable[[BaseException], BaseException]
) -> Callable[..., None] | None:
    """How Orbax's background threads meet: by barriers that know of failures. None for a single process.

    Args:
      what: the save under way, such as "the save of step 40".
      described: the error to tell, from the one that came.
    """
    group = process_group()
    if group.process_count == 1:
        return None

    def barrier(*, key: str, timeout_ms: int) -> None:
        # Orbax ends a save by meeting the others also where it has failed: then the error is on its way through here.
        error = sys.exception()
        if error is not None:
            if not isinstance(error, ProcessFailedError):
                report_alone(what(), described(error))
            return
        purpose = next((purpose for part, purpose in _PURPOSES.items() if part in key), "its bookkeeping")
        try:
            # The key's end is the step: a name for each would stay in the coordination service.
            name = f"checkpoint: {key.partition('.')[0]}"
            group.barrier(name, timeout_ms / 1000, title=f"{what()} ({purpose})")
        except ProcessFailedError:
            if threading.current_thread() is threading.main_thread() or not group.is_watched:
                raise
            # The main thread or the watch ends this process; Orbax would print this error before theirs.
            threading.Event().wait(timeout_ms / 1000)
            raise

    return barrier


def poll(busy: Callable[[], Any]) -> None:
    """Wait for the end of something that threads of this process do, or for a failure.

    Raises:
      ProcessFailedError: if another process has failed.
    """
    group = process_group()
    while group.process_count > 1 and busy():
        if group.failure is not None and group.failure.process == group.process_index:
            return  # told by those threads, which end
        group.check()
        group.failed.wait(0.01)
