"""Ranks that share processors: the bounds that hold for every schedule, and one step by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.schedules import Costs, ScheduleError, Std1F1B, simulate
from jaxpp_flax.schedules.task import forward
from tests.schedules.helpers import costs_for, schedules


@given(st.data())
def test_a_processor_for_each_rank_changes_nothing(data: st.DataObject):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule.num_stages))
    m = data.draw(st.integers(1, 6))
    latency = data.draw(st.sampled_from([0.0, 0.25]))
    free = simulate(schedule, costs, latency, num_microbatches=m)
    shared = simulate(schedule, costs, latency, num_microbatches=m, processors=schedule.num_ranks)
    assert shared.events == free.events


@given(st.data())
def test_fewer_processors_are_never_overcommitted_and_never_idle_without_need(data: st.DataObject):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule.num_stages))
    m = data.draw(st.integers(1, 6))
    processors = data.draw(st.integers(1, schedule.num_ranks))
    free = simulate(schedule, costs, num_microbatches=m)
    shared = simulate(schedule, costs, num_microbatches=m, processors=processors)
    assert [[e.task for e in rank] for rank in shared.events] == [[e.task for e in rank] for rank in free.events]
    events = [event for rank in shared.events for event in rank]
    for event in events:
        running = [e for e in events if e.start <= event.start < e.end]
        assert len(running) <= processors
    work = sum(e.end - e.start for e in events)
    assert shared.makespan >= max(work / processors, free.makespan) * (1 - 1e-9)
    # Graham's bound for a list schedule: work over processors, and the critical path.
    assert shared.makespan <= (work / processors + free.makespan) * (1 + 1e-9)
    if processors == 1:
        assert shared.makespan == pytest.approx(work)


def test_two_ranks_on_one_processor_by_hand():
    costs = Costs(forward=[1.0, 2.0], backward=[2.0, 3.0])
    step = simulate(Std1F1B(2), costs, num_microbatches=2, processors=1)
    first, second = ([(str(e.task), e.start, e.end) for e in rank] for rank in step.events)
    assert first == [("fwd_0__0", 0, 1), ("fwd_0__1", 1, 2), ("bwd_0__0", 7, 9), ("bwd_0__1", 14, 16)]
    assert [(start, end) for _, start, end in second] == [(2, 7), (9, 14)]


def test_what_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="processors must be at least 1, got 0"):
        simulate(Std1F1B(2), num_microbatches=2, processors=0)
    with pytest.raises(ScheduleError, match="waits for 0F0, which nobody runs"):
        simulate([[forward(1, 0)], []], processors=1)
