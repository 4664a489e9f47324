"""What the processes of a run say to each other besides arrays: barriers, small values, who lives, and why it ended.

It rests on the key-value store of JAX's coordination service (`jax.distributed.initialize`). Every process writes a
heartbeat there and reads those of the others; a process that was killed, stopped, or has failed is named in each other
process within a deadline, together with what that process was waiting for. In a single process everything here does
nothing, at once.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import NoReturn

import jax

from jaxpp_flax import _compat
from jaxpp_flax.processes.activity import place_of_main_thread
from jaxpp_flax.processes.environment import seconds_of
from jaxpp_flax.processes.store import (
    BarrierTimeoutError,
    CoordinationError,
    JaxKeyValueStore,
    ProcessFailedError,
    claim_index,
)
from jaxpp_flax.processes.waits import REPORT_SECONDS, Reporter, Waits, quietly
from jaxpp_flax.processes.watch import DEFAULT_FAILURE_TIMEOUT, ROOT, Failure, KeyValueStore, Watch, name_processes

__all__ = [
    "PEER_FAILED_STATUS",
    "PREEMPTED_STATUS",
    "BarrierTimeoutError",
    "CoordinationError",
    "Failure",
    "KeyValueStore",
    "ProcessFailedError",
    "ProcessGroup",
    "process_group",
]

PEER_FAILED_STATUS = 69
"""Exit status of a process that ends because another one failed."""

PREEMPTED_STATUS = 75
"""Exit status after SIGTERM, once the checkpoint is complete: start the program again and it goes on from there."""

# How often a wait looks for failures; short against every deadline, long against a call to the store (0.2 ms).
_POLL_SECONDS = 0.2


class ProcessGroup:
    """All processes of a run, as one of them sees it.

    Barriers and exchanges have names. Every process must use the same names in the same order; a name may be used any
    number of times, and processes may be inside several different ones at once (from several threads).

    `watch` starts the heartbeats. A failure then makes every wait here raise `ProcessFailedError`; code that waits for
    another process by other means calls `check` while it waits, inside `waiting`, which also says what for.

    Args:
      store: the store that all processes share, or None for a single process.
      process_index: this process's index, 0 to `process_count` - 1.
      process_count: how many processes there are.

    Example:
      >>> group = ProcessGroup(None, 0, 1)
      >>> group.barrier("compiled", timeout_s=10.0)
      >>> group.exchange("program", b"hash", timeout_s=10.0)
      [b'hash']
    """

    def __init__(self, store: KeyValueStore | None, process_index: int, process_count: int) -> None:
        if not 0 <= process_index < process_count:
            raise ValueError(
                f"process_index must be 0 to {process_count - 1} in {process_count} processes, not {process_index}."
            )
        if store is None and process_count > 1:
            raise ValueError(f"{process_count} processes need a store that they share; `store` is None.")
        self.process_index = process_index
        self.process_count = process_count
        self.service = "the coordination service"  # as errors name it
        self.identity = f"process id {os.getpid()} of host {socket.gethostname()}"
        self._store = store
        self._uses: Counter[str] = Counter()
        self._closing: list[Callable[[], None]] = []
        self._asked: Counter[str] = Counter()
        self._announced: dict[str, bytes] = {}
        self._failure: Failure | None = None
        self._waits_at_failure: list[str] = []
        self.failed = threading.Event()
        self.idle: str | None = None  # why this process sends nothing any more, until the others have come here too
        self.meeting: str | None = None  # which one the main thread is at, if it is at any
        self.runs = 0  # of programs that several processes run, begun here
        self.step: int | None = None  # as the user counts them, if somebody has told; for messages
        self._waits = Waits()
        self._reporter: Reporter | None = None
        self._main_thread = threading.main_thread()
        self._watch: Watch | None = None
        self._ending, self._observing = threading.Lock(), threading.Lock()

    # -- meeting points

    def barrier(self, name: str, timeout_s: float | None = None, *, what: str | None = None) -> None:
        """Wait until every process has come to this barrier.

        Args:
          name: what is waited for, as the error says it.
          timeout_s: seconds to wait, or None to wait until a process fails.
          what: other words for it, where they differ from time to time: names are kept for as long as the run.

        Raises:
          BarrierTimeoutError: if some processes have not come in time; it names them.
          ProcessFailedError: if one of them has failed.
        """
        self._meet(name, None, timeout_s, what)

    def exchange(self, name: str, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Give every process's value to every process.

        Values go through the coordination service (about 25 MB/s): meant for hashes and addresses, not for arrays.

        Args:
          name: what the values are, as the error says it.
          value: this process's value; sizes may differ.
          timeout_s: seconds to wait, or None to wait until a process fails.

        Returns:
          The values in the order of the processes.

        Raises:
          BarrierTimeoutError: if some processes have not come in time; it names them.
          ProcessFailedError: if one of them has failed.
        """
        return self._meet(name, value, timeout_s)

    def numbered(self, name: str) -> str:
        """`name` with how often it has been asked for: the same in all processes that ask in the same order.

        Example:
          >>> group = ProcessGroup(None, 0, 1)
          >>> group.numbered("the last step"), group.numbered("the last step")
          ('the last step 1', 'the last step 2')
        """
        self._asked[name] += 1
        return f"{name} {self._asked[name]}"

    def announce(self, name: str, value: bytes) -> None:
        """Tell every process something without waiting for any: the first announcement of a name is the only one.

        Args:
          name: what is announced.
          value: what `announced` gives, in every process, from about now on.
        """
        if self._store is None:
            self._announced.setdefault(name, value)
        elif self._store.add(f"{ROOT}/announcements/{name}/count") == 1:
            self._store.set(f"{ROOT}/announcements/{name}/value/0", value)

    def announced(self, name: str) -> bytes | None:
        """What has been announced under this name; None if nothing has, or not for long. It takes about 0.2 ms.

        Example:
          >>> group = ProcessGroup(None, 0, 1)
          >>> group.announce("stop", b"7"), group.announce("stop", b"9"), group.announced("stop")
          (None, None, b'7')
        """
        if self._store is None:
            return self._announced.get(name)
        return self._store.list(f"{ROOT}/announcements/{name}/value").get("0")

    def _meet(self, name: str, value: bytes | None, timeout_s: float | None, what: str | None = None) -> list[bytes]:
        if self._store is None:
            return [b"" if value is None else value]
        store = self._store
        self._uses[name] += 1
        use = self._uses[name]
        here = f"{ROOT}/meet/{name}/{use}"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        what, named = what or name, list[int]()
        with self.waiting(lambda: what if named else f"{what} (every process)"), self._at_meeting(f"{what} ({use})"):
            self.check()
            if value is not None:
                store.set(f"{here}/values/{self.process_index}", value)
            # Whoever waits looks at these again and again, and values may be large.
            store.set(f"{here}/came/{self.process_index}", b"")
            if store.add(f"{here}/count") == self.process_count:
                store.set(f"{here}/complete", b"")
            while store.get(f"{here}/complete", _POLL_SECONDS) is None:
                self.check()
                came = store.list(f"{here}/came")
                missing = [index for index in range(self.process_count) if str(index) not in came]
                if self._is_main():
                    named = missing
                    self._waits.on(missing)
                if deadline is not None and time.monotonic() > deadline:
                    raise self._absent(what, timeout_s, missing)
            values = store.list(f"{here}/values") if value is not None else {}
        # Whoever is here has left the use before, and so has everyone else: all of them have come to this one.
        if use > 1 and self.process_index == 0:
            store.delete(f"{ROOT}/meet/{name}/{use - 1}")
        return [values[str(index)] for index in range(self.process_count)] if value is not None else []

    def _is_main(self) -> bool:
        # Where another thread waits, those of the other processes may still come while their main threads stand.
        return threading.current_thread() is self._main_thread

    @contextmanager
    def _at_meeting(self, name: str) -> Generator[None]:
        if not self._is_main():
            yield
            return
        self.meeting = name
        try:
            yield
        finally:
            self.meeting = None

    def _absent(self, name: str, timeout_s: float | None, missing: list[int]) -> BarrierTimeoutError:
        return BarrierTimeoutError(
            f"{name_processes(missing)} of {self.process_count} did not come to {name!r} within {timeout_s:g} s; "
            f"process {self.process_index} waited. Look at the missing processes' logs: they are slower than that, "
            "stand still, or run another program. Raise the timeout if they only need longer."
        )

    def meet_idle(self, name: str, value: bytes, why: str) -> list[bytes]:
        """`exchange`, where this process sends nothing any more until all have come: whoever waits for it then fails.

        Args:
          name, value: as in `exchange`.
          why: what to tell them, such as "its data ended after step 7".
        """
        self.idle = why
        try:
            return self.exchange(name, value)
        finally:
            self.idle = None

    # -- values that some processes need

    def publish(self, key: str, value: bytes) -> None:
        """Leave a value for whoever asks for it with `fetch`; it stays for as long as the run.

        Args:
          key: a path with slashes, used once.
          value: small: a hash, an address, a description.
        """
        if self._store is not None:
            self._store.set(f"{ROOT}/published/{key}", value)

    def fetch(self, key: str, what: str, on: int, timeout_s: float | None = None) -> bytes:
        """What process `on` has published, or will have.

        Args:
          key: as it was published.
          what: the value in words, as the error says it.
          on: the process that publishes it.
          timeout_s: seconds to wait, or None to wait until a process fails.

        Raises:
          BarrierTimeoutError: if it does not come in time.
          ProcessFailedError: if a process has failed.
        """
        if self._store is None:
            raise CoordinationError(f"{what} is awaited from process {on}, but there is one process alone.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.waiting(what, on=on):
            while (value := self._store.get(f"{ROOT}/published/{key}", _POLL_SECONDS)) is None:
                self.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise BarrierTimeoutError(
                        f"process {on} did not give {what} within {timeout_s:g} s; process {self.process_index} "
                        "waited. Look at its log: it is slower than that, stands still, or runs another program."
                    )
        return value

    # -- failures

    @property
    def failure(self) -> Failure | None:
        """The first failure that this process knows of; None while all goes well."""
        return self._failure

    def check(self, cause: BaseException | None = None) -> None:
        """Raise if a process of the run has failed; costs an attribute's lookup. To be called while waiting.

        Args:
          cause: an error that its failure has brought here.

        Raises:
          ProcessFailedError: naming the process, and what this one waits for.
        """
        if self._failure is not None:
            raise ProcessFailedError(self.describe(self._failure)) from cause

    def describe(self, failure: Failure) -> str:
        """The failure and what this process waits for, in a sentence or two."""
        # A wait may have been given up since the failure became known.
        waits = self.waits() or self._waits_at_failure
        awaited = f"was waiting for {'; and for '.join(waits)}" if waits else f"was at {place_of_main_thread()}"
        return f"{failure}\nProcess {self.process_index} {awaited}."

    def report_failure(self, message: str) -> None:
        """Tell every process that this one cannot go on, and why. Only the first report of a run is kept.

        Args:
          message: what happened, such as a traceback.
        """
        self.observe(Failure(self.process_index, message), tell=True)

    def observe(self, failure: Failure, *, tell: bool = False) -> None:
        """Take note of a failure that was found by other means (by the launcher, or by a transport).

        Args:
          failure: what happened.
          tell: also tell the other processes.
        """
        with self._observing:
            if self._failure is not None:
                return
            waits = self.waits()
            if tell and self._store is not None:
                # Before this process hears of it itself, and may end by that.
                self._tell(self._store, failure)
            self._waits_at_failure = waits
            self._failure = failure
            self.failed.set()

    def _tell(self, store: KeyValueStore, failure: Failure) -> None:
        text = f"{'' if failure.process is None else failure.process}\n{failure.message}"
        quietly(lambda: store.set(f"{ROOT}/failures/{self.process_index}", text.encode()), timeout_s=2.0)

    def observe_end(self, failure: Failure) -> None:
        """Take note that a process has ended, as its launcher saw it; what it has reported itself says why.

        Args:
          failure: its end.
        """
        reports: list[bytes | None] = []
        if self._store is not None:
            get, key = self._store.get, f"{ROOT}/failures/{failure.process}"
            # Whoever was killed has reported nothing.
            quietly(lambda: reports.append(get(key, 0.1)), timeout_s=1.0)
        _, _, report = (next(iter(reports), None) or b"").decode(errors="replace").partition("\n")
        if report:
            # Its traceback is in its own output.
            why = report.splitlines()[-1] if report.startswith("Traceback") else report
            failure = Failure(failure.process, f"{failure.message}: {why}")
        self.observe(failure)

    # -- what is waited for

    def waiting(
        self, what: str | Callable[[], str], on: int | None = None, run: int | None = None
    ) -> AbstractContextManager[None]:
        """Say what this thread waits for inside the block: for the errors of this process, and if it takes a minute.

        Waits within waits are told together: "the save of step 40: where the data stands". Costs about 2 µs.

        Args:
          what: such as "stage 2's activations of microbatch 3"; a function is called only when it is asked.
          on: the process that is waited for: if it ends its program meanwhile, that is a failure.
          run: the number of the run (as `runs` counts them) that it comes from: if that process does nothing more
            after an earlier one, that is a failure too.
        """
        if self._store is None and self._reporter is None:
            self._report_waits("this process")  # with several processes `watch` does
        return self._waits.waiting(what, on, run)

    def _report_waits(self, who: str) -> None:
        after = seconds_of(os.environ, "JAXPP_FLAX_REPORT_AFTER", REPORT_SECONDS)
        self._reporter = Reporter(self._waits, who, after)
        self._reporter.start()

    def waits(self) -> list[str]:
        """What the threads of this process wait for at the moment."""
        return self._waits.texts()

    def awaited(self) -> list[tuple[int, int | None]]:
        """The processes that the threads of this one wait for now, each with the run of what they wait for."""
        return [(process, wait.run) for wait in self._waits.now() for process in wait.on]

    # -- the watch

    def was_heard(self, process: int, within_s: float) -> bool:
        """Whether a sign of life of another process has come within the last seconds."""
        return self._watch is not None and self._watch.was_heard(process, within_s)

    @property
    def is_watched(self) -> bool:
        """Whether `watch` has begun, and `close` has not ended it."""
        return self._watch is not None

    def watch(
        self,
        failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT,
        on_failure: Callable[[Failure], None] | None = None,
    ) -> None:
        """Write heartbeats, and look for those of the others, in two background threads.

        Does nothing in a single process, or if the watch runs already.

        Args:
          failure_timeout_s: seconds within which a failure anywhere has ended every process. A process counts as
            lost after 60 % of it without a heartbeat; a heartbeat needs Python's lock for a moment, so a call that
            holds it longer than that (few do) needs a higher value.
          on_failure: called in a background thread, once, 10 % of the timeout after a failure became known, if the
            process still lives then. The main thread may be in a call that never returns, so what it should do, and
            does by default (`end_process`), is to end the process.

        Raises:
          ValueError: if the timeout is not positive.
          CoordinationError: if another process has this one's index.
        """
        if failure_timeout_s <= 0:
            raise ValueError(f"failure_timeout_s must be positive, not {failure_timeout_s}.")
        if self._store is None or self._watch is not None:
            return
        claim_index(self._store, self.process_index, self.process_count, self.identity)
        self._watch = Watch(self, self._store, failure_timeout_s, on_failure or self.end_process)
        self._report_waits(f"process {self.process_index}")

    def end_process(self, failure: Failure | str) -> NoReturn:
        """Say on stderr what failed and what this process waited for, and end it, whatever its threads are doing.

        Args:
          failure: what happened; or the whole message, if what was waited for has been said already.
        """
        with self._ending:
            text = failure if isinstance(failure, str) else self.describe(failure)
            print(f"jaxpp_flax: the run has ended: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            own = self._failure is not None and self._failure.process == self.process_index
            os._exit(1 if own else PEER_FAILED_STATUS)

    def when_closed(self, function: Callable[[], None]) -> None:
        """Call `function` at the end, once every process has ended its program."""
        self._closing.append(function)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every process has ended its program, and stop the watch. Call it once, at the end.

        Args:
          timeout_s: seconds to wait, or None to wait until a process fails.

        Raises:
          BarrierTimeoutError, ProcessFailedError: as `barrier`.
        """
        if self._watch is not None:
            self._watch.finished = True
        self.barrier("the end of the program", timeout_s)
        for function in self._closing:
            function()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._reporter is not None:
            self._reporter.stop()


@cache
def process_group() -> ProcessGroup:
    """This process's view of the run, as `jax.distributed` was set up before the first call.

    Raises:
      CoordinationError: if there are several processes and their key-value store, which has no public name, is not
        to be used (`JAXPP_FLAX_PUBLIC_API_ONLY`) or not where it was in the JAX versions known.

    Example:
      >>> process_group().process_count
      1
    """
    connection = _compat.coordination_client()
    if connection is not None:
        group = ProcessGroup(JaxKeyValueStore(connection.client), connection.process_index, connection.process_count)
        group.service = f"the coordination service at {_compat.coordinator_address()} (the host of process 0)"
        return group
    if jax.distributed.is_initialized():
        raise CoordinationError(_compat.why_one_process())
    return ProcessGroup(None, 0, 1)
