"""A watchdog over the receives of this process, so that no wait is without end.

Receives are asynchronous: the process waits inside JAX for an array. If its sender is gone, this array never becomes
ready. A thread therefore follows the oldest receive that has not arrived, and reports it to the process group, whose
errors name it. When a process of the run has failed, the thread turns all awaited arrays into errors.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, Transport
from jaxpp_flax.processes.failures import observe_broken_connection
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.processes.waits import reporting_thread

__all__ = ["Watchdog"]

# Short, because arrays that have arrived stay in memory until the next poll. A receive does not wake the thread: that
# would cost the receive 10 us on busy cores.
_POLL_SECONDS = 0.02


class Watchdog:
    """Follows the receives of one transport in a background thread.

    Args:
      transport: abandons its peers after a failure.
      group: knows the processes that have failed; the watchdog reports the awaited parcels to it.

    Attributes:
      receiving: the process from which the transport is about to receive: it may wait inside for the parcel, as NCCL
        does, which is followed only then.
    """

    def __init__(self, transport: Transport, group: ProcessGroup) -> None:
        self._transport, self._group = transport, group
        self._pending: deque[tuple[Parcel, Tag, Any, int]] = deque()
        self.receiving: int | None = None
        self._stopped = threading.Event()
        self._thread = reporting_thread("jaxpp_flax watchdog", self._run, self._report)
        self._thread.start()

    def follow(self, parcel: Parcel, tag: Tag, arrays: list[Any]) -> None:
        """Watch a receive whose arrays are not ready yet; the thread sees it at its next poll."""
        self._pending.append((parcel, tag, arrays[-1], self._group.runs))

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._group.failed.is_set():
                self._abandon_all()
            if not self._pending:
                self._stopped.wait(_POLL_SECONDS)
                continue
            parcel, tag, array, run = self._pending[0]
            if not _arrived(array):
                self._await(parcel, tag, array, run)
            self._pass_on_error(parcel, tag, array, run)
            if not self._group.failed.is_set():
                self._pending.popleft()
            del array

    def _await(self, parcel: Parcel, tag: Tag, array: Any, run: int) -> None:
        # All earlier receives have arrived. So the wait for this one begins now.
        with self._group.waiting(lambda: tag.awaited, parcel.source, run, tag.number):
            while not (self._stopped.is_set() or _arrived(array) or self._group.failed.wait(_POLL_SECONDS)):
                pass

    def _pass_on_error(self, parcel: Parcel, tag: Tag, array: Any, run: int) -> None:
        """Report an error of a receive: a killed process closes its connections, so its arrays become errors."""
        if self._group.failed.is_set() or not _arrived(array) or array.is_deleted():
            return
        try:
            array.block_until_ready()
        except RuntimeError as error:
            # The group describes the failure by the wait of this thread.
            what = tag.awaited
            with self._group.waiting(what, parcel.source, run, tag.number):
                observe_broken_connection(self._group, parcel.source, what, error)

    def _abandon_all(self) -> None:
        # Taken out one by one: the main thread may add receives meanwhile, and these are abandoned as well.
        peers: set[int] = set()
        if (peer := self.receiving) is not None:
            self.receiving = None
            peers.add(peer)
        while self._pending:
            peers.add(self._pending.popleft()[0].source)
        for peer in peers:
            self._transport.abandon(peer)

    def _report(self, failure: str) -> None:
        self._group.report_failure(failure)
        self._abandon_all()


def _arrived(array: Any) -> bool:
    # The watchdog does not wait for a deleted value or for an error: JAX reports these when the value is used.
    try:
        return array.is_deleted() or array.is_ready()
    except RuntimeError:
        return True
