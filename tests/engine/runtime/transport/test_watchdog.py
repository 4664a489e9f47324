"""The thread that follows receives: while others are followed, when it fails itself, and whom it blames."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.engine.runtime.transport.connection import Connection, ConnectionSettings
from jaxpp_flax.engine.runtime.transport.watchdog import Watchdog
from jaxpp_flax.processes import ProcessFailedError, ProcessGroup, errors_naming_failed_process
from jaxpp_flax.processes.failures import Failure
from tests.engine.stores import MemoryStore
from tests.running import wait_for

TAG = Tag("p", 4, 1, what="what task fwd_1 needs of rank 1")


class Awaited:
    """A received array that is not there yet, or that has become an error."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.error is not None

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError(self.error)


class Abandoning:
    """A transport that notes which peers it was told to abandon."""

    def __init__(self, also: Callable[[], None] = lambda: None) -> None:
        self.abandoned: list[int] = []
        self._also = also

    def abandon(self, peer: int) -> None:
        self._also()
        self.abandoned.append(peer)


@pytest.fixture(autouse=True)
def watches_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop each test's watches: a heartbeat looks at the main thread's calls, and would do so in all later tests."""
    groups: list[ProcessGroup] = []
    watch = ProcessGroup.watch

    def noted_watch(group: ProcessGroup, *arguments: Any) -> None:
        groups.append(group)
        watch(group, *arguments)

    monkeypatch.setattr(ProcessGroup, "watch", noted_watch)
    yield
    for group in groups:
        monkeypatch.setattr(group, "barrier", lambda *_: None)  # the others have no such end
        group.close()
    left = [thread.name for thread in threading.enumerate() if thread.name == "jaxpp_flax heartbeat"]
    assert not left


def parcel(source: int) -> Parcel:
    return Parcel(source, 0, (), ())


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Python changes threads after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often_switching")
def test_what_is_followed_while_a_failure_becomes_known_is_abandoned_too():
    # An error in the thread would fail the test: pytest makes one of it.
    group, transport = ProcessGroup(None, 0, 1), Abandoning()
    watchdog = Watchdog(transport, group)  # type: ignore[arg-type]
    for _ in range(2000):
        watchdog.follow(parcel(1), TAG, [Awaited()])
    group.observe(Failure(3, "killed"))
    while not transport.abandoned:
        watchdog.follow(parcel(1), TAG, [Awaited()])
    watchdog.follow(parcel(2), TAG, [Awaited()])  # as a step does that was under way
    wait_for(lambda: 2 in transport.abandoned)
    watchdog.stop()
    assert not watchdog._thread.is_alive(), "it uses the transport, which is closed next"
    assert transport.abandoned[0] == 1


def test_a_transport_that_waits_for_a_parcel_is_told_to_give_up_its_sender():
    """NCCL's waits inside `recv`, so the parcel is not followed yet."""
    group, abandoned = ProcessGroup(None, 0, 1), threading.Event()

    class Waiting(Abandoning):
        def recv(self, parcel: Parcel, tag: Tag) -> list[Any]:
            group.observe(Failure(2, "killed"))
            assert abandoned.wait(30.0)
            raise ProcessFailedError("given up")

        def close(self) -> None: ...

    transport = Waiting(abandoned.set)
    connection = Connection(group, transport, ConnectionSettings())  # type: ignore[arg-type]
    with pytest.raises(ProcessFailedError, match="given up"):
        connection.recv(parcel(1), TAG)
    connection.watchdog.stop()
    assert transport.abandoned == [1]


def test_a_watchdog_that_fails_tells_everyone():
    def fail() -> None:
        raise OSError("no such connection")

    store = MemoryStore()
    group, other = ProcessGroup(store, 0, 2), ProcessGroup(store, 1, 2)
    other.watch(600.0, lambda failure: None)
    transport = Abandoning()
    watchdog = Watchdog(transport, group)  # type: ignore[arg-type]
    broken = Awaited()
    broken.is_ready = fail  # type: ignore[assignment, method-assign]
    watchdog.follow(parcel(1), TAG, [broken])
    wait_for(lambda: transport.abandoned)
    wait_for(lambda: other.failure is not None)
    watchdog.stop()
    assert other.failure is not None
    assert other.failure.process == 0
    assert "its thread 'jaxpp_flax watchdog' failed: OSError: no such connection" in other.failure.message


def test_an_error_that_its_sender_was_sent_itself_waits_for_the_sender_s_report():
    store = MemoryStore()
    victim, last = ProcessGroup(store, 1, 3), ProcessGroup(store, 0, 3)
    for group in (victim, last):
        group.watch(20.0, lambda failure: None)
    watchdog = Watchdog(Abandoning(), last)  # type: ignore[arg-type]
    watchdog.follow(parcel(1), TAG, [Awaited("INTERNAL: SocketServer: Connection closed")])
    time.sleep(0.5)  # process 1 lives, and is still to find out whose error it passes on
    assert last.failure is None
    victim.observe(Failure(2, "its connection broke"), tell=True)
    wait_for(lambda: last.failure is not None)
    watchdog.stop()
    assert last.failure == Failure(2, "its connection broke")


@pytest.mark.parametrize("lives", [True, False])
def test_a_sender_that_nobody_reports_is_named_in_the_end(lives: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPP_FLAX_BIND_ADDRESS", "127.0.0.1")
    monkeypatch.setattr("jaxpp_flax.processes.failures._LIVES_SECONDS", 0.4 if lives else 600.0)
    monkeypatch.setattr("jaxpp_flax.processes.failures._REPORT_SECONDS", 0.4)
    store = MemoryStore()
    sender, group = ProcessGroup(store, 1, 2), ProcessGroup(store, 0, 2)
    for process in (group, sender):
        process.watch(100.0, lambda failure: None)
    wait_for(lambda: store.get("jaxpp_flax/beats/1", 0.1) is not None)
    if not lives:
        assert sender._door is not None
        sender._door.close()  # as the system does with that of a killed process
    watchdog = Watchdog(Abandoning(), group)  # type: ignore[arg-type]
    watchdog.follow(parcel(1), TAG, [Awaited("INTERNAL: SocketServer: Connection closed\nat a line of C++")])
    wait_for(lambda: group.failure is not None)
    watchdog.stop()
    assert group.failure is not None
    assert group.failure.process == 1
    says = "its connection broke while process 0 waited for what task fwd_1 needs of rank 1, in step 4"
    assert group.failure.message.startswith(says)
    assert "(INTERNAL: SocketServer: Connection closed). Look for the reason" in group.failure.message


def test_an_error_of_a_peer_s_where_a_value_is_fetched_names_the_peer(monkeypatch: pytest.MonkeyPatch):
    group = ProcessGroup(MemoryStore(), 0, 2)
    monkeypatch.setattr("jaxpp_flax.processes.group.process_group", lambda: group)
    threading.Timer(0.2, lambda: group.observe(Failure(1, "it was killed"))).start()
    with pytest.raises(ProcessFailedError, match="process 1: it was killed") as caught, errors_naming_failed_process():
        raise jax.errors.JaxRuntimeError("INTERNAL: SocketServer: Connection closed")
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"), errors_naming_failed_process():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
