"""How far a process runs ahead of what it receives, and what it says where that does not come."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import jax
import pytest

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram
from jaxpp_flax.engine.runtime.transport.flow_control import Window
from jaxpp_flax.processes import ProcessFailedError, ProcessGroup


class Awaited:
    """A received array that is not there yet."""

    waited = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        self.waited += 1
        if self.error is not None:
            raise self.error


PARCEL, TAG = Parcel(1, 0, (), ()), Tag("p", 4, 1, what="what task fwd_1 needs of rank 1")


def test_tasks_wait_for_the_oldest_receive_once_too_many_hang_on_it():
    window, array = Window(ProcessGroup(None, 0, 1), max_tasks=2), Awaited()
    window.received(array, PARCEL, TAG)
    waits = []
    for _ in range(4):
        window.before_task()
        waits.append(array.waited)
    assert waits == [0, 0, 1, 1]


def test_what_has_arrived_is_not_kept_until_the_next_step():
    window, array = Window(ProcessGroup(None, 0, 1), max_tasks=2), Awaited()
    window.received(array, PARCEL, TAG)
    kept = weakref.ref(array)
    del array  # by the watchdog, once it has arrived
    assert kept() is None
    for _ in range(4):
        window.before_task()


def test_messages_name_the_step_that_the_user_counts():
    group = ProcessGroup(None, 0, 1)
    program = DistributedProgram(SimpleNamespace(group=group), "program 1", "program-1-0f")  # type: ignore[arg-type]
    assert program.tag(7, call=1, what="").step == 1  # nobody counts steps: the first call
    group.step = 13  # a run that goes on after step 12
    assert program.tag(7, call=1, what="a mean") == Tag("program-1-0f", 13, 7, 1, "a mean")
    # A restore takes the steps back, but no parcel may have the name of another.
    assert program.tag(7, call=2, what="").id(0, 1) != program.tag(7, call=1, what="").id(0, 1)


def test_what_does_not_arrive_is_named_with_what_to_do():
    window = Window(ProcessGroup(None, 0, 1), max_tasks=0)
    array = Awaited(jax.errors.JaxRuntimeError("INTERNAL: connection closed"))
    window.received(array, PARCEL, TAG)
    says = (
        r"process 1: its connection broke while process 0 waited for what task fwd_1 needs .* in step 4.*connection "
        r"closed.*Look .* of process 1, then start"
    )
    with pytest.raises(ProcessFailedError, match=says):
        window.before_task()
