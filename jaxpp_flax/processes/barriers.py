"""The barriers of the processes of a run, and the small values that they share, all kept in the store."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from jaxpp_flax.processes.store import ROOT, BarrierTimeoutError, CoordinationError, KeyValueStore
from jaxpp_flax.processes.waits import MOST_NAMED, Waits, name_processes

__all__ = ["Barriers", "SharedValues"]

# How often a wait looks for failures; short against every deadline, long against a call to the store (0.2 ms).
_POLL_SECONDS = 0.2
# The calls of `SharedValues.beside` that the store keeps; processes are at most two or three steps apart.
_KEPT_CALLS = 16


class Barriers:
    """The barriers of one process: each waits until all processes have come, and may exchange their values.

    Args:
      store: the store that all processes share, or None for a single process.
      check: raises if a process of the run has failed.

    Attributes:
      current: the barrier that the main thread is at; None if it is at none.
      idle_reason: why this process sends nothing until all have come to its barrier; None if it goes on.
    """

    def __init__(
        self,
        store: KeyValueStore | None,
        process_index: int,
        process_count: int,
        waits: Waits,
        check: Callable[[], None],
    ) -> None:
        self.current: str | None = None
        self.idle_reason: str | None = None
        self._store, self._index, self._count = store, process_index, process_count
        self._waits, self._check = waits, check
        self._uses: Counter[str] = Counter()
        self._kept: dict[str, str] = {}  # by name: what the store still holds of the last use
        self._last_of_main = ""
        self._main_thread = threading.main_thread()

    def wait(
        self,
        name: str,
        value: bytes | None,
        timeout_s: float | None = None,
        *,
        title: str | None = None,
        idle_reason: str | None = None,
    ) -> list[bytes]:
        """Wait until every process has come to the barrier, and return their values.

        Either every process gives a value, or all give None. The other arguments are those of `ProcessGroup.barrier`.
        """
        if self._store is None:
            return [b"" if value is None else value]
        self._uses[name] += 1
        use, title = self._uses[name], title or name
        here = f"{ROOT}/barriers/{name}/{use}"
        with self._at(f"{title} ({use})", idle_reason):
            values = self._come_and_wait(self._store, here, value, timeout_s, title)
        if self._index == 0:
            self._forget_left(self._store, name)
            self._kept[name] = here
        return [values[str(index)] for index in range(self._count)] if value is not None else []

    def _come_and_wait(
        self, store: KeyValueStore, here: str, value: bytes | None, timeout_s: float | None, title: str
    ) -> Mapping[str, bytes]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        named = list[int]()
        with self._waits.waiting(lambda: title if named else f"{title} (every process)"):
            self._check()
            if value is not None:
                store.set(f"{here}/values/{self._index}", value)
            # Apart from the values, which may be large.
            store.set(f"{here}/came/{self._index}", b"")
            place = store.add(f"{here}/count")
            # A broken connection may have counted some twice; the last one finds all there.
            if place >= self._count and not self._missing(store, here):
                store.set(f"{here}/complete", b"")
            while store.get(f"{here}/complete", _POLL_SECONDS) is None:
                self._check()
                if place == 1:  # looks for all, so that the load on the store grows with the number of processes only
                    missing = self._missing(store, here)
                    told = missing[:MOST_NAMED], len(missing[MOST_NAMED:])  # short, since all read it
                    store.set(f"{here}/missing/0", json.dumps(told).encode())
                if self._is_main():
                    named, more = json.loads(store.list(f"{here}/missing").get("0", b"[[], 0]"))
                    self._waits.set_awaited(named, more)
                if deadline is not None and time.monotonic() > deadline:
                    raise self._timeout_error(title, timeout_s, self._missing(store, here))
            return store.list(f"{here}/values") if value is not None else {}

    def _forget_left(self, store: KeyValueStore, name: str) -> None:
        """Take out of the store what all processes have left by coming here: the use of this name before.

        The main threads, which come to their barriers in one order, have also left the last barrier of any name: the
        names of programs and their arguments never come again.
        """
        names = [name]
        if self._is_main():
            names.append(self._last_of_main)
            self._last_of_main = name
        for left in names:
            if (kept := self._kept.pop(left, None)) is not None:
                store.delete(kept)

    def _missing(self, store: KeyValueStore, here: str) -> list[int]:
        came = store.list(f"{here}/came")
        return [index for index in range(self._count) if str(index) not in came]

    def _is_main(self) -> bool:
        # If another thread waits here, the main threads of the missing processes may stand while those threads come.
        return threading.current_thread() is self._main_thread

    @contextmanager
    def _at(self, barrier: str, idle_reason: str | None) -> Generator[None]:
        if idle_reason is not None:
            self.idle_reason = idle_reason
        if self._is_main():
            self.current = barrier
        try:
            yield
        finally:
            if self._is_main():
                self.current = None
            if idle_reason is not None:
                self.idle_reason = None

    def _timeout_error(self, title: str, timeout_s: float | None, missing: list[int]) -> BarrierTimeoutError:
        return BarrierTimeoutError(
            f"{name_processes(missing)} of {self._count} did not come to {title!r} within {timeout_s:g} s; "
            f"process {self._index} waited. Look at the missing processes' logs: they are slower than that, "
            "hang, or run another program. Raise the timeout if they only need longer."
        )


class SharedValues:
    """Values that one process gives and others read, without a barrier.

    Example:
      >>> values = SharedValues(None, 0, Waits(), lambda: None)
      >>> values.announce("stop", b"7"), values.announce("stop", b"9"), values.announcement("stop")
      (None, None, b'7')
    """

    def __init__(
        self, store: KeyValueStore | None, process_index: int, waits: Waits, check: Callable[[], None]
    ) -> None:
        self._store, self._index, self._waits, self._check = store, process_index, waits, check
        self._numbers: Counter[str] = Counter()
        self._announced: dict[str, bytes] = {}

    def publish(self, key: str, value: bytes) -> None:
        """Write a small value for the processes that call `fetch`. Each key may be used once in a run."""
        if self._store is not None:
            self._store.set(f"{ROOT}/published/{key}", value)

    def fetch(self, key: str, what: str, on: int, timeout_s: float | None = None) -> bytes:
        """Wait for `what`, a value that process `on` publishes under this key; None waits until a process fails.

        Raises:
          BarrierTimeoutError: if the value does not come in time.
          ProcessFailedError: if a process has failed.
        """
        if self._store is None:
            raise CoordinationError(f"{what} is awaited from process {on}, but this run has only one process.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waits.waiting(what, on=on):
            while (value := self._store.get(f"{ROOT}/published/{key}", _POLL_SECONDS)) is None:
                self._check()
                if deadline is not None and time.monotonic() > deadline:
                    raise BarrierTimeoutError(
                        f"process {on} did not give {what} within {timeout_s:g} s; process {self._index} "
                        "waited. Look at its log: it is slower than that, hangs, or runs another program."
                    )
        return value

    def announce(self, name: str, value: bytes) -> None:
        """Give every process a value, without waiting. Only the first announcement of a name counts."""
        if self._store is None:
            self._announced.setdefault(name, value)
        else:
            self._store.claim(f"{ROOT}/announcements/{name}/0", value)

    def announcement(self, name: str) -> bytes | None:
        """The value announced under this name; None if there is none yet. The call takes about 0.2 ms."""
        if self._store is None:
            return self._announced.get(name)
        return self._store.list(f"{ROOT}/announcements/{name}").get("0")

    def beside(self, name: str, value: bytes, words: bytes) -> dict[int, bytes]:
        """Give a value in one of the processes' common calls, and return those that are given already, by process.

        Nobody waits: the process that gives its value last sees all of them. A call takes about 0.5 ms. A process must
        not be ahead of another one by as many calls of a name as `_KEPT_CALLS`.

        Args:
          name: the calls are counted for each name.
          value: a small value, such as a hash: every process reads that of every other one.
          words: what it stands for, for `words_beside`.

        Example:
          >>> SharedValues(None, 0, Waits(), lambda: None).beside("shapes", b"7", b"seven")
          {0: b'7'}
        """
        self._numbers[name] += 1
        number = self._numbers[name]
        if self._store is None:
            return {self._index: value}
        here = f"{number % _KEPT_CALLS}"
        self._store.set(f"{ROOT}/words/{name}/{here}/{self._index}", words)
        self._store.set(f"{ROOT}/beside/{name}/{here}/{self._index}", f"{number} ".encode() + value)
        entries = self._store.list(f"{ROOT}/beside/{name}/{here}").items()
        parted = {int(process): entry.partition(b" ") for process, entry in entries}
        return {process: rest for process, (count, _, rest) in parted.items() if int(count) == number}

    def words_beside(self, name: str) -> dict[int, bytes]:
        """Return the words that the processes have given in the present call of `beside`."""
        if self._store is None:
            return {}
        entries = self._store.list(f"{ROOT}/words/{name}/{self._numbers[name] % _KEPT_CALLS}")
        return {int(process): words for process, words in entries.items()}

    def numbered_name(self, name: str) -> str:
        """Return `name` with the number of calls for it so far.

        Processes that make these calls in the same order get the same names.

        Example:
          >>> values = SharedValues(None, 0, Waits(), lambda: None)
          >>> values.numbered_name("the last step"), values.numbered_name("the last step")
          ('the last step 1', 'the last step 2')
        """
        self._numbers[name] += 1
        return f"{name} {self._numbers[name]}"
