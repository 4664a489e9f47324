"""Failures, and errors that another process's failure causes: by a broken connection, or by a value that is an error.

A process that fails takes others with it: their connections break, and the values that they send on are errors too.
Each process repeats the first report of a run. So a process that was only hit waits for the report of the one that
failed, before it names a process itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "DEFAULT_FAILURE_TIMEOUT",
    "PEER_FAILED_STATUS",
    "PREEMPTED_STATUS",
    "Failure",
    "WatchedGroup",
    "await_report",
    "first_failure",
    "observe_broken_connection",
]

DEFAULT_FAILURE_TIMEOUT = 30.0
"""Seconds within which every process has ended after one of them was killed, stopped, or failed."""

PEER_FAILED_STATUS = 69
"""Exit status of a process that ends because another one failed."""

PREEMPTED_STATUS = 75
"""Exit status after SIGTERM, if the checkpoint is complete: start the program again to continue from there."""


@dataclass(frozen=True)
class Failure:
    """Why the run cannot go on.

    Attributes:
      process: index of the process that failed, or None if it is unknown.
      message: the process's end in words, such as an exception's type and message.
    """

    process: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.process is None else f"process {self.process}: {self.message}"


class WatchedGroup(Protocol):
    """The parts of a `ProcessGroup` that this file uses."""

    process_index: int
    process_count: int
    failed: threading.Event

    def observe(self, failure: Failure, *, tell: bool = False) -> None: ...

    def has_ended(self, process: int) -> bool: ...


def first_failure(failures: Mapping[str, bytes]) -> Failure:
    """The failure to repeat: one that a process reports of itself comes before those that others report of it."""
    parsed: list[tuple[bool, str, Failure]] = []
    for reporter, value in failures.items():
        process, _, message = value.decode(errors="replace").partition("\n")
        parsed.append((process != reporter, reporter, Failure(int(process) if process else None, message)))
    return min(parsed, key=lambda entry: entry[:2])[2]


# -- errors of JAX that another process's failure has caused

# A process that fails by itself reports it before its connections break; the others read reports each second.
_REPORT_SECONDS = 2.0
# A process that still lives was hit itself, and waits for a report before it makes one.
_LIVES_SECONDS = 8.0


def await_report(group: WatchedGroup, process: int | None) -> None:
    """Wait until a report says which process failed; at most ten seconds.

    A value that `process` has sent has become an error; None if the sender is unknown.
    """
    known = group.process_count == 1 or group.failed.wait(_REPORT_SECONDS)
    if not known and (process is None or not group.has_ended(process)):
        group.failed.wait(_LIVES_SECONDS)


def observe_broken_connection(group: WatchedGroup, process: int, what: str, error: BaseException) -> None:
    """Record that the connection to process `process` broke, unless a report names the process that failed first."""
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
