"""Residuals that a plan recomputes or offloads: one step by hand, and rules that hold for every schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.schedules import Costs, GPipe, Link, ScheduleError, Std1F1B, ZeroBubble, simulate
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals, host_copies
from jaxpp_flax.schedules.task import backward
from tests.schedules.helpers import costs_for, schedules

ALL = StageResiduals(offload=1.0)
AGAIN = StageResiduals(recompute=True)


@st.composite
def plans(draw: st.DrawFn, num_stages: int) -> ResidualPlan:
    entry = st.builds(
        StageResiduals,
        recompute=st.booleans(),
        offload=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    )
    stages = draw(st.lists(entry, min_size=num_stages, max_size=num_stages))
    return ResidualPlan(stages, fetch_ahead=draw(st.integers(1, 3)))


def test_offload_and_fetch_by_hand():
    """GPipe on one rank of two: F0 F1 F2, then B0 B1 B2; each copy takes 1.5, an F takes 1 and a B 2."""
    costs = Costs(activation=3.0)
    tasks = GPipe(2).tasks(3)
    plan = ResidualPlan([ALL, KEEP])
    step = simulate(tasks, costs, residuals=plan, host_link=Link(bandwidth=2.0))
    copies = [
        (c.microbatch, c.offload_start, c.offload_end, c.fetch_issued, c.fetch_start, c.fetch_end)
        for c in step.host_events[0]
    ]
    # F ends at 1, 2, 3; the link is free again at 2.5 and 4. B0 of stage 1 ends at 6. The fetch of 0 is issued in front
    # of F2, and waits for its offload; that of 1 is issued when B0 could start, and waits for nothing.
    assert copies == [
        (0, 1.0, 2.5, 2.0, 2.5, 4.0),
        (1, 2.5, 4.0, 3.0, 4.0, 5.5),
        (2, 4.0, 5.5, 8.0, 8.0, 9.5),
    ]
    assert step.makespan == simulate(tasks, costs).makespan
    assert step.host_memory(0)[:3] == [(1.0, 3.0), (2.5, 6.0), (4.0, 3.0)]


def test_a_slow_link_delays_the_backward():
    plan = ResidualPlan([ALL, KEEP])
    slow = simulate(GPipe(2), num_microbatches=3, residuals=plan, host_link=Link(bandwidth=0.1))
    last = slow.host_events[0][-1]
    starts = {event.task: event.start for event in slow.events[0]}
    assert starts[backward(0, 2)] == last.fetch_end
    assert slow.makespan == last.fetch_end + 2


def test_recomputation_by_hand():
    costs = Costs(forward=1.0, backward=2.0, activation=8.0, stage_input=1.0)
    plan = ResidualPlan([AGAIN, KEEP])
    step = simulate(GPipe(2), costs, num_microbatches=4, residuals=plan)
    assert {e.end - e.start for e in step.events[0]} == {1.0, 3.0}
    # Four inputs of 1, and the residuals of the one microbatch whose backward runs.
    assert step.peak_memory == (4.0 + 7.0, 32.0)
    assert step.memory(0)[-1][1] == 0.0
    both = ResidualPlan([StageResiduals(recompute=True, offload=1.0), KEEP])
    moved = simulate(GPipe(2), costs, num_microbatches=4, residuals=both)
    assert {copy.size for copy in moved.host_events[0]} == {1.0}
    known = Costs(forward=1.0, backward=2.0, recomputation=0.25)
    step = simulate(GPipe(2), known, num_microbatches=4, residuals=plan)
    assert step.events[0][-1].task == backward(0, 3)
    assert {e.end - e.start for e in step.events[0]} == {1.0, 2.25}


def test_the_input_gradient_recomputes_for_the_weight_gradient():
    plan = ResidualPlan([AGAIN] * 2)
    step = simulate(ZeroBubble(2), num_microbatches=4, residuals=plan)
    lengths = {
        str(e.task).removesuffix(f"__{e.task.microbatch}"): e.end - e.start for rank in step.events for e in rank
    }
    assert lengths == {"fwd_0": 1.0, "bwd_0": 3.0, "fwd_1": 1.0, "bwd_i_1": 2.0, "bwd_w_1": 1.0}


@settings(max_examples=50)
@given(st.data())
def test_copies_are_legal_and_memory_is_given_back(data: st.DataObject):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule.num_stages))
    m = data.draw(st.integers(1, 6))
    plan = data.draw(plans(schedule.num_stages))
    link = Link(latency=data.draw(st.sampled_from([0.0, 0.25])), bandwidth=data.draw(st.sampled_from([0.5, 2.0])))
    step = simulate(schedule, costs, num_microbatches=m, residuals=plan, host_link=link)
    table = costs.table(schedule.num_stages, plan)
    for rank, events in enumerate(step.events if step.host_events else ()):
        copies = step.host_events[rank]
        placed = {(c.stage, c.microbatch): c for c in host_copies([e.task for e in events], plan)}
        assert placed.keys() == {(c.stage, c.microbatch) for c in copies}
        for copy in copies:
            at = placed[copy.stage, copy.microbatch]
            assert copy.size == table.stages[copy.stage].saved
            assert events[at.offload_after].end <= copy.offload_start <= copy.offload_end <= copy.fetch_start
            assert copy.fetch_end <= events[at.read_at].start
            assert at.offload_after + 2 <= at.fetch_before < at.read_at
            assert copy.fetch_issued == events[at.fetch_before - 1].end
        assert all(a.fetch_end <= b.fetch_start for a, b in pairwise(copies))
        away = sorted((copy.offload_start, copy.offload_end) for copy in copies)
        assert all(a[1] <= b[0] for a, b in pairwise(away))
        for steps in (step.memory(rank), step.host_memory(rank)):
            assert all(held > -1e-9 for _, held in steps)
            assert not steps or abs(steps[-1][1]) < 1e-9
        assert step.peak_host_memory[rank] == max((held for _, held in step.host_memory(rank)), default=0.0)


@settings(max_examples=50)
@given(st.data())
def test_an_instant_link_delays_nothing_and_a_kept_plan_changes_nothing(data: st.DataObject):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule.num_stages))
    m = data.draw(st.integers(1, 6))
    plain = simulate(schedule, costs, 0.25, num_microbatches=m)
    kept = ResidualPlan.keep(schedule.num_stages)
    assert simulate(schedule, costs, 0.25, num_microbatches=m, residuals=kept, host_link=Link(9.0)) == plain
    moved = simulate(schedule, costs, 0.25, num_microbatches=m, residuals=ResidualPlan([ALL] * schedule.num_stages))
    assert moved.events == plain.events
    assert all(a <= b for a, b in zip(moved.peak_memory, plain.peak_memory, strict=True))


def test_close_pairs_and_fused_tasks_stay_on_the_devices():
    plan = ResidualPlan([ALL] * 3)
    lists = Std1F1B(3).tasks(6)
    assert not host_copies(lists[2], plan)  # fused
    assert [copy.microbatch for copy in host_copies(lists[0], plan)] == [0, 1, 2, 3, 4, 5]
    assert [copy.microbatch for copy in host_copies(lists[1], plan)] == [1, 2, 3, 4]  # one task between the others


@pytest.mark.parametrize("link", [None, Link(bandwidth=1.0)])
def test_a_plan_for_other_stages_is_refused(link: Link | None):
    for plan in (ResidualPlan([ALL] * 2), ResidualPlan.keep(2)):
        with pytest.raises(ScheduleError, match="has 2 entries, but the schedule has 3 stages"):
            simulate(Std1F1B(3), num_microbatches=4, residuals=plan, host_link=link)
    with pytest.raises(ScheduleError, match="fetch_ahead=0"):
        ResidualPlan([ALL], fetch_ahead=0)
