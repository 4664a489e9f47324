"""The process group: barriers, failures and the watch, over a store in memory; real processes are in tests/launch."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest

from jaxpp_flax.processes import (
    BarrierTimeoutError,
    CoordinationError,
    ProcessFailedError,
    ProcessGroup,
    process_group,
)
from jaxpp_flax.processes.beats import Beat
from jaxpp_flax.processes.failures import Failure
from tests.engine.stores import MemoryStore, in_parallel
from tests.running import wait_for

pytestmark = pytest.mark.processes  # for their deadlines: silences of a fraction of a second


def groups(number: int, store: MemoryStore | None = None) -> list[ProcessGroup]:
    store = store or MemoryStore()
    return [ProcessGroup(store, index, number) for index in range(number)]


def nothing(failure: Failure) -> None:
    """In place of the end of the process, which a failure brings by default."""


def test_one_process_needs_nobody():
    group = ProcessGroup(None, 0, 1)
    group.watch()
    group.barrier("start", timeout_s=0.0)
    assert group.exchange("values", b"mine") == [b"mine"]
    group.close()
    assert process_group().process_count == 1


def test_an_index_outside_of_the_group_is_refused():
    with pytest.raises(ValueError, match="0 to 1 in 2 processes, not 2"):
        ProcessGroup(MemoryStore(), 2, 2)
    with pytest.raises(ValueError, match="2 processes need a store"):
        ProcessGroup(None, 0, 2)


def test_two_runs_at_one_address_are_told_apart():
    store = MemoryStore()
    first, second = groups(2, store)
    first.run_id, second.run_id = "job 7", "job 8"
    first.watch(600.0, nothing)
    says = "process 1 belongs to the run 'job 8', and process 0, which came first, to 'job 7'. End"
    with pytest.raises(CoordinationError, match=says):
        second.watch(600.0, nothing)
    assert not second.is_watched
    second.run_id = "job 7"
    second.watch(600.0, nothing)
    first.barrier, second.barrier = [lambda *_: None] * 2  # type: ignore[method-assign]
    for group in (first, second):
        group.close()


def test_an_index_belongs_to_one_process():
    store = MemoryStore()
    first, second = ProcessGroup(store, 1, 2), ProcessGroup(store, 1, 2)
    first.watch(600.0, nothing)
    second.identity = "process id 7 of host other"
    says = f"two processes of this run have the index 1 .*{first.identity}, and this one, process id 7 of host other"
    with pytest.raises(CoordinationError, match=says):
        second.watch(600.0, nothing)
    assert not second.is_watched


def test_values_come_in_the_order_of_the_processes_each_time():
    members = groups(12)

    def talk(group: ProcessGroup) -> list[list[bytes]]:
        return [group.exchange("values", f"{group.process_index} {i}".encode() * i) for i in range(4)]

    for answers in in_parallel([lambda g=g: talk(g) for g in members]):
        assert answers == [[f"{index} {i}".encode() * i for index in range(12)] for i in range(4)]


def test_nobody_leaves_a_barrier_before_everyone_has_come():
    members = groups(4)
    arrived: list[int] = []
    missed: list[int] = []

    def meet(group: ProcessGroup) -> None:
        for i in range(5):
            arrived.append(i)
            group.barrier("step")
            if arrived.count(i) < 4:
                missed.append(i)

    in_parallel([lambda g=g: meet(g) for g in members])
    assert not missed


def test_the_store_does_not_grow_with_barriers_whose_names_never_come_again():
    """As those of programs, each of which has a number."""
    store = MemoryStore()
    first, second = groups(2, store)
    names = [f"{what} of program {number}" for number in range(5) for what in ("the start", "the constants")]
    other = threading.Thread(target=lambda: [second.exchange(name, b"v") for name in names])
    other.start()
    sizes: list[int] = []
    for name in names:  # in the main thread, as a process of its own does
        first.exchange(name, b"v")
        sizes.append(len([key for key in store.entries if name not in key]))
    other.join()
    # Nothing of the names before, but what the other process may have begun of the next.
    assert max(sizes) < 10
    assert len([key for key in store.entries if "/barriers/" in key]) < 10


def test_the_store_does_not_grow_with_the_number_of_barriers():
    store = MemoryStore()
    members = groups(2, store)
    sizes: list[int] = []
    for _ in range(5):
        in_parallel([lambda g=g: g.exchange("values", b"v") for g in members])
        sizes.append(len(store.entries))
    assert sizes[1:] == [sizes[0]] * 4


def test_values_are_read_once_however_long_the_wait():
    store = MemoryStore()
    read: list[str] = []

    def counted(folder: str, plain: Callable[[str], dict[str, bytes]] = store.list) -> dict[str, bytes]:
        read.append(folder.rpartition("/")[2])
        return plain(folder)

    store.list = counted  # type: ignore[method-assign]
    early, late = groups(2, store)

    def come_late() -> list[bytes]:
        wait_for(lambda: len(read) >= 3)
        return late.exchange("hashes", b"large")

    assert in_parallel([lambda: early.exchange("hashes", b"large"), come_late]) == [[b"large"] * 2] * 2
    assert read.count("values") == 2


def test_a_late_process_is_named():
    members = groups(4)
    present = [members[0], members[2]]

    def meet(group: ProcessGroup) -> str:
        with pytest.raises(BarrierTimeoutError) as caught:
            group.barrier("all tasks compiled", timeout_s=0.3)
        return str(caught.value)

    for message in in_parallel([lambda g=g: meet(g) for g in present]):
        assert "processes 1, 3 of 4 did not come to 'all tasks compiled' within 0.3 s" in message


def test_of_many_late_processes_their_number_is_told():
    first, *_, last = groups(30)
    first.watch(600.0, nothing)
    thread = meet_as_main(first, "the start", [])
    named = f"processes {', '.join(map(str, range(1, 17)))}"
    wait_for(lambda: first.waits.texts() == [f"the start (from {named} and 13 more)"])
    last.report_failure("enough")
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_failure_ends_a_wait_and_says_what_was_awaited():
    members = groups(2)
    members[1].watch(600.0, nothing)

    def wait() -> str:
        with pytest.raises(ProcessFailedError) as caught:
            members[1].barrier("checkpoint written")
        return str(caught.value)

    messages: list[str] = []
    thread = threading.Thread(target=lambda: messages.append(wait()))
    thread.start()
    members[0].report_failure("ValueError: no more disk")
    thread.join(timeout=60)
    [message] = messages
    assert message.startswith("process 0: ValueError: no more disk")
    # Whether it had looked who was missing by then.
    assert re.search(r"Process 1 was waiting for checkpoint written \((every process|from process 0)\)", message)


def test_the_first_report_of_a_process_on_itself_is_the_one_told():
    store = MemoryStore()
    members = groups(3, store)
    members[0].observe(Failure(1, "no sign of life"), tell=True)
    members[1].report_failure("KeyError: 'tokens'\nin line 3")
    members[1].report_failure("a consequence")
    members[2].watch(600.0, nothing)
    wait_for(lambda: members[2].failure is not None)
    assert members[2].failure == Failure(1, "KeyError: 'tokens'\nin line 3")


def test_a_silent_process_is_lost_and_ends_the_others():
    store = MemoryStore()
    members = groups(3, store)
    ended: dict[int, Failure] = {}
    for group in members[:2]:
        group.watch(3.0, lambda failure, index=group.process_index: ended.setdefault(index, failure))
    store.set("jaxpp_flax/beats/2", Beat(number=1, place="train.py:7").text())  # one sign of life, and then none
    wait_for(lambda: len(ended) == 2)
    for failure in ended.values():
        assert failure.process == 2
        assert "no sign of life" in failure.message
    awaited = members[0].waiting(lambda: "stage 1's gradients", on=2)
    with (
        awaited,
        pytest.raises(ProcessFailedError, match=r"process 2: no sign of.*\n.*waiting for stage 1's gradients"),
    ):
        members[0].check()


def test_a_process_that_has_not_begun_is_not_lost():
    store = MemoryStore()
    members = groups(2, store)
    members[0].watch(0.2, nothing)
    time.sleep(0.6)  # five times the silence that would make it lost
    assert members[0].failure is None
    members[1].watch(60.0, nothing)
    in_parallel([group.close for group in members])


def test_a_store_that_hangs_is_a_failure_too():
    store = MemoryStore()
    [group, _] = groups(2, store)
    ended: list[Failure] = []
    group.watch(1.0, ended.append)
    wait_for(lambda: store.list("jaxpp_flax/beats"))
    store.hangs.set()
    try:
        wait_for(lambda: ended)
    finally:
        store.hangs.clear()
    assert ended[0].process is None
    assert "has not answered process 0" in ended[0].message


def test_a_thread_of_the_watch_that_fails_ends_the_process_and_is_told(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    members = groups(2, store)
    ended: list[Failure] = []
    for member in members:
        member.watch(4.0, ended.append)
    monkeypatch.setattr(members[0]._watch._heart, "beat", lambda now: 1 / 0)
    wait_for(lambda: len(ended) == 2)
    for failure in ended:
        assert failure.process == 0
        assert "its thread 'jaxpp_flax heartbeat' failed: ZeroDivisionError" in failure.message


def test_to_end_the_program_while_another_waits_is_a_failure():
    members = groups(2)
    for group in members:
        group.watch(4.0, nothing)

    def early() -> None:
        with pytest.raises(ProcessFailedError):
            members[0].close()

    def late() -> None:
        with members[1].waiting("microbatch 7 of stage 1", on=0):
            wait_for(lambda: members[1].failure)
            with pytest.raises(ProcessFailedError, match=r"(?s)process 0: it ended its program.*microbatch 7"):
                members[1].check()

    in_parallel([early, late])


@pytest.mark.parametrize("run", [7, 8])
def test_what_a_process_will_never_send_is_not_waited_for_long(run: int):
    members = groups(2)
    members[0].runs, members[1].runs = run, 7
    for group in members:
        group.watch(10.0, nothing)
    messages: list[str] = []
    ended = meet_as_main(members[1], "the end of fit", messages, idle="its data ended")
    begun = time.monotonic()
    with members[0].waiting("activations of microbatch 0", on=1, run=run):
        # What it sent in step 7 may be large and slow: it is waited for until 60 % of the timeout.
        wait_for(lambda: members[0].failure is not None or time.monotonic() - begun > 4.5)
        assert (members[0].failure is not None) == (run == 8)
    if run == 7:
        members[0].report_failure("the end of the test")
    ended.join(timeout=60)
    for member in members:
        member._watch.stop()
    if run == 8:
        assert (
            "process 1: it goes no further while others wait for it: its data ended. Process 0 waits for" in messages[0]
        )


def meet_as_main(group: ProcessGroup, name: str, messages: list[str], *, idle: str | None = None) -> threading.Thread:
    """A thread that plays a process's main thread, and comes to a barrier; it notes the error."""

    def meet() -> None:
        group.barriers._main_thread = threading.current_thread()
        with pytest.raises(ProcessFailedError) as caught:
            group.exchange(name, b"", idle_reason=idle)
        messages.append(str(caught.value))

    thread = threading.Thread(target=meet)
    thread.start()
    return thread


@pytest.mark.parametrize("idle", [None, "it waits in trainer.save"])
def test_processes_that_wait_for_all_at_different_places_are_told(idle: str | None):
    members = groups(2)
    messages: list[str] = []
    for member in members:
        member.watch(2.0, nothing)
    threads = [
        meet_as_main(members[0], "trainer.save", messages, idle=idle),
        meet_as_main(members[1], "the end of fit", messages, idle="its data ended" if idle else None),
    ]
    for thread in threads:
        thread.join(timeout=60)
    for member in members:
        member._watch.stop()
    assert len(messages) == 2
    for message in messages:
        assert "process 0" in message.lower(), message
        assert "process 1" in message.lower(), message
        assert re.search("trainer.save|the end of fit|its data ended", message), message


def test_a_process_that_ended_its_program_is_not_waited_for_at_a_barrier():
    members = groups(2)
    for member in members:
        member.watch(2.0, nothing)
    messages: list[str] = []
    thread = meet_as_main(members[0], "trainer.save", messages)

    def close() -> None:
        with pytest.raises(ProcessFailedError):
            members[1].close()

    closing = threading.Thread(target=close)
    closing.start()
    for one in (thread, closing):
        one.join(timeout=60)
    for member in members:
        member._watch.stop()
    assert "process 1: it ended its program while others wait for it" in messages[0]
    assert "was waiting for trainer.save (from process 1)" in messages[0]


def test_a_barrier_of_a_background_thread_is_no_sign_of_a_deadlock():
    members = groups(2)
    for member in members:
        member.watch(3.0, nothing)
    saving = threading.Thread(target=lambda: members[0].exchange("written", b""))
    saving.start()
    ended = [
        threading.Thread(target=lambda m=m: m.barrier("the end of fit", idle_reason="done"), daemon=True)
        for m in members
    ]
    members[1].barriers._main_thread = ended[1]
    ended[1].start()
    time.sleep(4.0)  # longer than any patience: process 1's own thread is to come, however long it writes
    assert members[0].failure is None
    members[1].exchange("written", b"")
    saving.join(timeout=60)
    ended[0].start()
    for thread in ended:
        thread.join(timeout=60)
    for member in members:
        assert member.failure is None
        member._watch.stop()


def test_waits_nest_and_end():
    group = ProcessGroup(None, 0, 1)
    with group.waiting("a"):
        with group.waiting(lambda: "b", on=3):
            assert group.waits.texts() == ["a: b (from process 3)"]
            assert [wait.on for wait in group.waits.now()] == [(3,)]
        assert group.waits.texts() == ["a"]
    assert group.waits.texts() == []


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match="positive, not 0"):
        groups(2)[0].watch(0.0)


def test_the_news_of_an_end_is_the_report_of_the_process_itself():
    first, second = groups(2)
    first.report_failure("the disk is full")
    second.observe_end(Failure(0, "it ended with exit status 1"))
    assert str(second.failure) == "process 0: the disk is full"


def test_the_news_of_an_end_without_a_report_is_the_launcher_s():
    _, second = groups(2)
    second.observe_end(Failure(0, "it was killed by SIGKILL"))
    assert str(second.failure) == "process 0: it was killed by SIGKILL"
