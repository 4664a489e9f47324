"""The seconds and the bytes of gathers in a simulated step, by hand: an F takes 1, a B 2, and 3 bytes take 1.5."""

from __future__ import annotations

import pytest

from jaxpp_flax.schedules import GPipe, ZeroBubble, simulate
from jaxpp_flax.schedules.gathers import Gathers
from jaxpp_flax.schedules.task import backward, forward, fused

BOTH = [{"a": 3.0}, {"b": 3.0}]


def starts(step, rank: int) -> list[float]:
    return [event.start for event in step.events[rank]]


def test_a_gather_stands_before_the_first_task():
    step = simulate(GPipe(2), num_microbatches=2, gathers=Gathers(BOTH, "step", bandwidth=2.0))
    # Rank 1 gathers while it waits for rank 0: only the gather of rank 0 makes the step longer, from 9.
    assert starts(step, 0) == [1.5, 2.5, 6.5, 8.5]
    assert starts(step, 1) == [2.5, 3.5, 4.5, 6.5]
    assert step.makespan == 10.5 + 1.5  # the reduction of gradients after the loop
    assert step.last_end == (12.0, 10.0)
    assert step.peak_memory == (5.0, 5.0)  # two microbatches of 1, and 3 gathered
    assert step.memory(0)[0] == (0.0, 3.0)
    assert [(g.name, g.start, g.freed) for rank in step.gather_events for g in rank] == [
        ("a", 0.0, 10.5),
        ("b", 0.0, 8.5),
    ]
    # In a sequence of steps the gather of rank 1 is not hidden: it runs from 1 to 2.5 at the latest.
    assert step.first_start == (0.0, 1.0)
    assert step.period == 12.0
    assert step.busy == simulate(GPipe(2), num_microbatches=2).busy


def test_every_task_gathers_and_every_backward_reduces():
    step = simulate(GPipe(2), num_microbatches=2, gathers=Gathers(BOTH, "microbatch", bandwidth=2.0))
    # F: 1 + 1.5; B: 2 + 1.5 for the parameters + 1.5 for the gradients.
    assert starts(step, 0) == [0.0, 2.5, 12.5, 17.5]
    assert step.makespan == 22.5
    assert step.peak_memory == (2.0, 2.0)


def test_a_split_backward_and_a_fused_task():
    each = Gathers([{}, {"a": 3.0}], "microbatch", bandwidth=2.0)
    events = {repr(event.task): event.end - event.start for event in simulate(ZeroBubble(2), num_microbatches=2,
                                                                             gathers=each).events[1]}  # fmt: skip
    assert set(events.values()) == {2.5}  # the input gradient gathers, the weight gradient reduces
    one = [[fused(0, 0)]]
    assert simulate(one, gathers=Gathers([{"a": 3.0}], "microbatch", 2.0)).makespan == 3 + 1.5 + 1.5
    assert simulate(one, gathers=Gathers([{"a": 3.0}], "step", 2.0)).makespan == 3 + 1.5 + 1.5


def test_a_parameter_of_two_stages_is_reduced_once_on_a_rank():
    tied = Gathers([{"a": 3.0}, {"a": 3.0}], "step", bandwidth=2.0)
    tasks = [[forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0)]]
    assert simulate(tasks, gathers=tied).makespan == 6 + 1.5 + 1.5


@pytest.mark.parametrize("fsdp", ["step", "microbatch"])
def test_an_instant_link_changes_no_time(fsdp):
    step = simulate(GPipe(2), num_microbatches=3, gathers=Gathers(BOTH, fsdp))
    assert step.makespan == simulate(GPipe(2), num_microbatches=3).makespan
