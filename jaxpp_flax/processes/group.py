"""The group of a run's processes as one of them sees it: barriers, small values, waits, failures, the end.

It rests on the key-value store of JAX's coordination service (`jax.distributed.initialize`). Every process writes a
heartbeat there, and one of them reads all heartbeats. If a process was killed, was stopped, or has failed, every other
process names it within a deadline, together with its own wait. In a single process all calls return at once.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import NoReturn

import jax

from jaxpp_flax import _compat
from jaxpp_flax._compat_texts.errors import may_come_from_a_peer
from jaxpp_flax.processes.barriers import Barriers, SharedValues
from jaxpp_flax.processes.doors import open_own_door
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT, PEER_FAILED_STATUS, Failure, await_report
from jaxpp_flax.processes.memory_link import MemoryLink
from jaxpp_flax.processes.store import (
    ROOT,
    CoordinationError,
    KeyValueStore,
    ProcessFailedError,
    claim_index,
    claim_run,
)
from jaxpp_flax.processes.waits import (
    REPORT_SECONDS,
    WaitReporter,
    Waits,
    call_with_limit,
    flush_output,
    main_thread_location,
    print_notice,
    seconds_from_environment,
)
from jaxpp_flax.processes.watch import FAILURES, Watch

__all__ = ["ProcessGroup", "errors_naming_failed_process", "process_group"]

# A process hears of a failure within a second, and has then as long to end as the one that noticed it.
_OTHERS_END_SECONDS = 3.0


class ProcessGroup:
    """All processes of a run, as one of them sees them.

    Barriers and exchanges have names. Every process must use the same names in the same order. A name may be used any
    number of times, and a process may be at several barriers at once, from several threads.

    `watch` starts the heartbeats. After that, if a process fails, every wait here raises `ProcessFailedError`. Code
    that waits for another process in another way must do so inside `waiting`, which names the awaited value, and call
    `check` while it waits.

    Args:
      store: the store that all processes share, or None for a single process.
      process_index: this process's index, 0 to `process_count` - 1.
      process_count: the number of processes.

    Attributes:
      values: small values that one process gives and others read, without a barrier.
      barriers: the barriers and exchanges of this process.
      waits: the present waits of the threads of this process.
      failure: the first failure that this process knows of; None if it knows of none.
      failed: an event that is set once a failure is known.
      service, service_address: the coordination service in words, for errors, and where it listens; "" if unknown.
      door: the address of this process's door (see `doors`), which is open between `watch` and `close`.
      serves: True if the coordination service runs inside this process, and ends with it.
      identity: a text that names this process, and no other that runs at the same time.
      life: random letters; a process that is started again has other ones.
      run_id: names the run, and no other one; "" if nobody has named it.
      attempt: how often the processes of the run have been started by their launcher, from 1.
      runs: the number of runs of programs across processes that this process has begun.
      begun: a function that names what this process began last, such as a task; None if it has begun nothing.
      step: the step as the user counts steps, for messages; None until the trainer sets it.
      on_step: called with each training step that begins; None: nobody asks.
      on_memory: called when the trainer goes on from a copy in `memory_file`; None: nobody asks.
      memory_file: descriptor of a file in memory that outlives the process; None if no other life of the run follows.
      memory_link: asks for copies at other hosts; None if the run has one host.
      place: the line of the user's code where an error ended the program of this process; None before.

    Example:
      >>> group = ProcessGroup(None, 0, 1)
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
        self.service, self.service_address = "the coordination service", ""
        self.door = ""
        self.serves = False
        self.life = secrets.token_hex(4)
        self.identity = f"process id {os.getpid()} of host {socket.gethostname()}"
        self.failed = threading.Event()
        self.runs = 0
        self.begun: Callable[[], str] | None = None
        self.begun_step = 0
        self.run_id = ""
        self.attempt = 1
        self.on_step: Callable[[int], None] | None = None
        self.on_memory: Callable[[], None] | None = None
        self.memory_file: int | None = None
        self.memory_link: MemoryLink | None = None
        self.step: int | None = None
        self.place: str | None = None
        self._store = store
        self.waits = Waits()
        self.barriers = Barriers(store, process_index, process_count, self.waits, self.check)
        self.values = SharedValues(store, process_index, self.waits, self.check)
        self._closing: list[Callable[[], None]] = []
        self.failure: Failure | None = None
        self._waits_at_failure: list[str] = []
        self._reporter: WaitReporter | None = None
        self._watch: Watch | None = None
        self._door: socket.socket | None = None
        self._ending, self._observing = threading.Lock(), threading.Lock()

    def note_step(self, step: int, *, trains: bool = True) -> None:
        """Note for messages which step this process is at; if it trains there, it has begun this step of the run."""
        self.step = step
        if trains and self.on_step is not None:
            self.on_step(step)

    # -- barriers

    def barrier(
        self,
        name: str,
        timeout_s: float | None = None,
        *,
        title: str | None = None,
        idle_reason: str | None = None,
    ) -> None:
        """Wait until every process has come to this barrier.

        Args:
          name: the barrier's name; the store keeps each name until the end of the run.
          timeout_s: seconds to wait, or None to wait without a limit (but a failure of a process ends the wait).
          title: the text for errors, if it changes from use to use; None: the name.
          idle_reason: why this process sends nothing to the others until all have come, such as "its data ended after
            step 7". If another process waits for a value of this one, the run fails with this reason. None: other
            threads of this process may still send.

        Raises:
          BarrierTimeoutError: if some processes have not come in time; the message names them.
          ProcessFailedError: if one of them has failed.
        """
        self.barriers.wait(name, None, timeout_s, title=title, idle_reason=idle_reason)

    def exchange(
        self, name: str, value: bytes, timeout_s: float | None = None, *, idle_reason: str | None = None
    ) -> list[bytes]:
        """Give every process the values of all processes.

        Values go through the coordination service, at about 25 MB/s: use it for hashes and addresses, not for arrays.
        It raises the errors of `barrier`.

        Args:
          name: a name for the values, for errors.
          value: this process's value; sizes may differ.
          timeout_s, idle_reason: as in `barrier`.

        Returns:
          The values in the order of the processes.
        """
        return self.barriers.wait(name, value, timeout_s, idle_reason=idle_reason)

    # -- failures

    def check(self, cause: BaseException | None = None) -> None:
        """Raise `ProcessFailedError` if a process of the run has failed; `cause` is the error that this caused here.

        Call it repeatedly during a wait: a call takes the time of one attribute lookup.
        """
        if self.failure is not None:
            raise ProcessFailedError(self.describe(self.failure)) from cause

    def describe(self, failure: Failure) -> str:
        """Return a text with the failure and with what this process was waiting for."""
        # A wait may have been given up since the failure became known.
        waits = self.waits.texts() or self._waits_at_failure
        if waits:
            return f"{failure}\nProcess {self.process_index} was waiting for {'; and for '.join(waits)}."
        return f"{failure}\nProcess {self.process_index} was at {self.place or main_thread_location()}."

    def report_failure(self, message: str) -> None:
        """Tell every process that this one cannot continue, and why. Only the first report of a run is kept."""
        self.observe(Failure(self.process_index, message), tell=True)

    def observe(self, failure: Failure, *, tell: bool = False) -> None:
        """Record a failure that was found here; with `tell`, report it to the others. Only the first one counts."""
        with self._observing:
            if self.failure is not None:
                return
            waits = self.waits.texts()
            if tell and self._store is not None:
                # Before the waits of this process raise, which may end it.
                self._tell(self._store, failure)
            self._waits_at_failure = waits
            self.failure = failure
            self.failed.set()

    def _tell(self, store: KeyValueStore, failure: Failure) -> None:
        text = f"{'' if failure.process is None else failure.process}\n{failure.message}"
        call_with_limit(lambda: store.set(f"{ROOT}/news/{FAILURES}/{self.process_index}", text.encode()), timeout_s=2.0)

    def observe_end(self, failure: Failure) -> None:
        """Record the end of a process that the launcher saw. If the process has reported an error, record that one."""
        reports: list[bytes | None] = []
        if self._store is not None:
            get, key = self._store.get, f"{ROOT}/news/{FAILURES}/{failure.process}"
            # A process that was killed has reported nothing.
            call_with_limit(lambda: reports.append(get(key, 0.1)), timeout_s=1.0)
        _, _, report = (next(iter(reports), None) or b"").decode(errors="replace").partition("\n")
        self.observe(Failure(failure.process, report) if report else failure)

    # -- waits

    def waiting(
        self,
        what: str | Callable[[], str],
        on: int | None = None,
        run: int | None = None,
        number: int | None = None,
    ) -> AbstractContextManager[None]:
        """Record what this thread waits for inside the block. Errors name it; after a minute, it is printed on stderr.

        Nested waits are reported together: "the save of step 40: where the data stands". A wait takes about 2 µs.

        Args:
          what: the awaited value, such as "stage 2's activations of microbatch 3"; or a function that returns the text.
          on: the process that sends the value. If it ends its program meanwhile, the run fails.
          run: the number of the run that sends the value, as `runs` counts runs. If process `on` stops after an earlier
            run, the run fails too.
          number: the position of the value's transfer in the order of that run, which all processes follow.
        """
        if self._store is None and self._reporter is None:
            self._report_waits("this process")  # with several processes `watch` does
        return self.waits.waiting(what, on, run, number)

    def _report_waits(self, process: str) -> None:
        self._reporter = WaitReporter(self.waits, process, _report_after())
        self._reporter.start()

    # -- the watch

    def has_ended(self, process: int) -> bool:
        """Return whether another process is known to have ended; its host is asked."""
        return self._watch is not None and self._watch.has_ended(process)

    @property
    def is_watched(self) -> bool:
        """True between the calls of `watch` and of `close`."""
        return self._watch is not None

    def watch(
        self,
        failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT,
        on_failure: Callable[[Failure], None] | None = None,
    ) -> None:
        """Write heartbeats and learn of the others' failures, in two background threads.

        It does nothing in a single process, or if the watch runs already. If all wait for a process that is alive, a
        message names it after a minute (`JAXPP_FLAX_REPORT_AFTER`); the run ends after `JAXPP_FLAX_STUCK_TIMEOUT`
        seconds, if this variable is set.

        Args:
          failure_timeout_s: seconds within which the failure of one process ends all of them. A process counts as lost
            after 60 % of this time without a heartbeat. A heartbeat needs Python's global lock for a moment. If a call
            holds that lock for longer than the 60 %, which is rare, use a higher value.
          on_failure: called once, 10 % of the timeout after a failure became known, if this process is still alive. It
            should end the process, since the main thread may be in a call that never returns. None: `end_process`.

        Raises:
          ValueError: if the timeout is not positive.
          CoordinationError: if another process has this one's index, or belongs to another run.
        """
        if failure_timeout_s <= 0:
            raise ValueError(f"failure_timeout_s must be positive, not {failure_timeout_s}.")
        if self._store is None or self._watch is not None:
            return
        claim_run(self._store, self.process_index, self.run_id)
        claim_index(self._store, self.process_index, self.process_count, self.identity)
        stuck = seconds_from_environment(os.environ, "JAXPP_FLAX_STUCK_TIMEOUT", math.inf)
        self._door, self.door = open_own_door(self.service_address)
        self._watch = Watch(
            self,
            self._store.without_patience(),
            failure_timeout_s,
            on_failure or self.end_process,
            report_s=_report_after(),
            stuck_s=stuck,
        )
        self._watch.start()
        self._report_waits(f"process {self.process_index}")

    def end_process(self, failure: Failure | str) -> NoReturn:
        """Print the failure and the waits of this process on stderr, and end the process without waiting for threads.

        If `failure` is a text, it is the whole message.
        """
        with self._ending:
            text = failure if isinstance(failure, str) else self.describe(failure)
            print_notice(f"the run has ended: {text}")
            flush_output()
            if self.serves:
                # JAX aborts all others, without a reason, once the service is gone. They hear of a failure later.
                time.sleep(_OTHERS_END_SECONDS)
            own = self.failure is not None and self.failure.process == self.process_index
            os._exit(1 if own else PEER_FAILED_STATUS)

    def when_closed(self, function: Callable[[], None]) -> None:
        """Call `function` at the end, once every process has ended its program."""
        self._closing.append(function)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every process has ended its program, as `barrier` does, and stop the watch. Call it once."""
        if self._watch is not None:
            self._watch.finish()
        self.barrier("the end of the program", timeout_s)
        for function in self._closing:
            function()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._door is not None:
            self._door.close()
        if self._reporter is not None:
            self._reporter.stop()


def _report_after() -> float:
    return seconds_from_environment(os.environ, "JAXPP_FLAX_REPORT_AFTER", REPORT_SECONDS)


@cache
def process_group() -> ProcessGroup:
    """Return the group of this run's processes. All calls return one object, which the first call makes.

    Call `jax.distributed.initialize` or `jaxpp_flax.launch.initialize` before the first call.

    Raises:
      CoordinationError: if there are several processes, and this version of JAX does not have their key-value store (it
        has no public name) in the place where the known versions have it.

    Example:
      >>> process_group().process_count
      1
    """
    connection = _compat.coordination_client()
    if connection is not None:
        client, index, count = connection
        group = ProcessGroup(KeyValueStore(client), index, count)
        group.serves = index == 0
        group.service_address = _compat.coordinator_address() or ""
        group.service = f"the coordination service at {group.service_address} (the host of process 0)"
        return group
    if jax.distributed.is_initialized():
        raise CoordinationError(_compat.why_one_process())
    return ProcessGroup(None, 0, 1)


@contextmanager
def errors_naming_failed_process() -> Generator[None]:
    """A context for code that fetches values: if an error of JAX comes from a failed process, name that process.

    Raises:
      ProcessFailedError: in place of an error of JAX that the failure of another process caused.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        group = process_group()
        if group.process_count > 1 and may_come_from_a_peer(error):
            await_report(group, None)
            if group.failure is not None and group.failure.process != group.process_index:
                group.check(error)
        raise
