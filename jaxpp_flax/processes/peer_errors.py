"""Errors of JAX that tell of another process's end in words of a socket: whose failure it was, and why.

A process that fails takes others with it: their connections break, and what they send on are errors too. The first
report of a run is the one that everybody tells, so a process that is only hit looks for the report of the one that hit
it before it names that one itself.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import jax

from jaxpp_flax.processes.group import Failure, ProcessGroup, process_group

__all__ = ["await_report", "may_be_a_peers", "naming_the_peer", "observe_broken"]

# Words in errors of JAX's that may well be another process's death: wait for the news of it.
_WORDS = (
    "unavailable", "connect", "socket", "peer", "gloo", "poison", "aborted", "cancelled", "transferring", "recv",
    "broken pipe",
)  # fmt: skip

# A process that has failed by itself has told so before its connections break, and heartbeats read that each second.
_REPORT_SECONDS = 2.0
# One that lives was hit itself, and waits for a report before it makes one.
_LIVES_SECONDS = 10.0
# A process whose heartbeats, one a second, are older than that counts as dead here.
_SILENT_SECONDS = 2.5
_POLL_SECONDS = 0.05


def may_be_a_peers(error: BaseException) -> bool:
    """Whether an error of JAX's may be another process's death.

    >>> may_be_a_peers(RuntimeError("INTERNAL: SocketServer: Connection closed")), may_be_a_peers(ValueError("shape"))
    (True, False)
    >>> may_be_a_peers(RuntimeError("recv() failed errno: 107 err: Transport endpoint is not connected"))
    True
    """
    text = str(error).lower()
    return any(word in text for word in _WORDS)


def await_report(group: ProcessGroup, process: int | None) -> None:
    """Wait until it is known which process failed, or nobody seems to tell; at most ten seconds.

    Args:
      group: the processes.
      process: what it sent has become an error; None: it is not known whose error it is.
    """
    begun = time.monotonic()
    while group.process_count > 1 and not group.failed.wait(_POLL_SECONDS):
        lives = process is None or group.was_heard(process, _SILENT_SECONDS)
        if time.monotonic() - begun > (_LIVES_SECONDS if lives else _REPORT_SECONDS):
            return


def observe_broken(group: ProcessGroup, process: int, what: str, error: BaseException) -> None:
    """Take note that what process `process` sent has become an error, unless a report says whose failure that is.

    Args:
      group: the processes.
      process: the sender.
      what: what it was to send.
      error: of JAX's.
    """
    await_report(group, process)
    group.observe(
        Failure(
            process,
            f"its connection broke while process {group.process_index} waited for {what}: it was killed, or ended its "
            f"program early ({str(error).splitlines()[0]}). Look for the reason at the end of the output of process "
            f"{process}, then start the run again, from its last checkpoint.",
        ),
        tell=True,
    )


@contextmanager
def naming_the_peer() -> Generator[None]:
    """Where values are fetched: an error of JAX's that another process's failure has brought names that one.

    Raises:
      ProcessFailedError: in place of such an error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        group = process_group()
        if group.process_count > 1 and may_be_a_peers(error):
            await_report(group, None)
            if group.failure is not None and group.failure.process != group.process_index:
                group.check(error)
        raise
