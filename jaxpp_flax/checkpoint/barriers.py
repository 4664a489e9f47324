"""The waits of processes for each other in a save or restore: each has a name, and ends if one process fails.

Most of these are waits of Orbax in JAX's coordination service, which does not report failures to other processes. An
error in only one process would leave the others waiting for minutes. So the process reports its error, and the run
ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jaxpp_flax.processes.group import errors_naming_failed_process, process_group
from jaxpp_flax.processes.store import ProcessFailedError

# The purposes of Orbax's barriers, by a part of the barrier's name; all other barriers are Orbax's bookkeeping.
_PURPOSES = {"async_write_complete": "every process's part of it", "async_commit_complete": "commit"}

# The error that the program was handling when a save or restore began. A save in an `except` block still finds it in
# `sys.exception()`: that error is no failure of the save.
_handled: ContextVar[BaseException | None] = ContextVar("_handled", default=None)


def name_checkpoint(path: Path) -> str:
    """Name a checkpoint in a few words, for messages.

    Example:
      >>> name_checkpoint(Path("/runs/gpt/40/state")), name_checkpoint(Path("/weights/base"))
      ('step 40', '/weights/base')
    """
    return next((f"step {place.name}" for place in (path, path.parent) if place.name.isdigit()), str(path))


@contextmanager
def shared_work(what: str, described: Callable[[Exception], Exception], *, everywhere: bool = False) -> Generator[None]:
    """Run a part of a save or restore in which processes wait for each other.

    Args:
      what: the name of the work, such as "the save of step 40", for the errors of waiting processes.
      described: makes the error to raise from the error of the work.
      everywhere: True if every process raises the error. Else this process reports the error, and all processes end.

    Example:
      >>> with shared_work("the save of step 40", lambda error: OSError(f"cannot save: {error}")):
      ...     raise ValueError("full")
      Traceback (most recent call last):
          ...
      OSError: cannot save: full
    """
    before = _handled.set(sys.exception())
    try:
        with process_group().waiting(what), errors_naming_failed_process():
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
    finally:
        _handled.reset(before)


def report_alone(what: str, error: BaseException) -> None:
    """Report an error of this process to the others, which would wait for this process for ever."""
    group = process_group()
    if group.process_count > 1:
        group.report_failure(f"{what} failed in this process, and others wait for it: {error}")


def background_barrier(
    what: Callable[[], str], described: Callable[[BaseException], BaseException]
) -> Callable[..., None] | None:
    """Make the barrier for Orbax's background threads; a failure of a process ends it. None for a single process.

    `what` and `described` are as in `shared_work`; `what` is called during the save under way.
    """
    group = process_group()
    if group.process_count == 1:
        return None

    def barrier(*, key: str, timeout_ms: int) -> None:
        # Orbax calls this barrier at the end of a failed save too: then the save's error is being handled here.
        error = sys.exception()
        if error is not None and error is not _handled.get():
            if not isinstance(error, ProcessFailedError):
                report_alone(what(), described(error))
            return
        purpose = next((purpose for part, purpose in _PURPOSES.items() if part in key), "its bookkeeping")
        try:
            # The key's end, the step, is left out: the coordination service keeps each name until the run ends.
            name = f"checkpoint: {key.partition('.')[0]}"
            group.barrier(name, timeout_ms / 1000, title=f"{what()} ({purpose})")
        except ProcessFailedError:
            if threading.current_thread() is threading.main_thread() or not group.is_watched:
                raise
            # The main thread or the watch ends this process. Without this wait, Orbax would print this error first.
            threading.Event().wait(timeout_ms / 1000)
            raise

    return barrier


def poll(busy: Callable[[], Any]) -> None:
    """Wait while `busy()` is true for the threads of this process; end early if a process fails."""
    group = process_group()
    while group.process_count > 1 and busy():
        if group.failure is not None and group.failure.process == group.process_index:
            return  # the threads have reported the failure, and end
        group.check()
        group.failed.wait(0.01)
