"""What every schedule promises, at random counts and costs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.schedules import CustomSchedule, Link, Transfer, merge_order, normalize, simulate, validate
from jaxpp_flax.schedules.task import TaskKind, flatten
from tests.schedules.helpers import brute_force, costs_for, schedules


@given(schedules(), st.integers(1, 13))
def test_each_task_once_legal_and_in_bound(schedule, microbatches):
    validate(schedule, microbatches)
    lists = schedule.tasks(microbatches)
    flat = [task for tasks in lists for task in flatten(tasks)]
    assert len(flat) == len(set(flat))
    kinds = {stage: {t.kind.value for t in flat if t.stage == stage} for stage in range(schedule.num_stages)}
    for stage, seen in kinds.items():
        assert seen == (set("FIW") if schedule.splits_backward and stage else set("FB"))
    fused = [task for tasks in lists for task in tasks if task.kind is TaskKind.FUSED]
    assert len(fused) == (microbatches if schedule.fuses_last_stage else 0)


@settings(max_examples=60)
@given(st.data(), schedules(max_ranks=3, max_per_rank=2), st.integers(1, 5))
def test_simulator_equals_brute_force(data, schedule, microbatches):
    costs = data.draw(costs_for(schedule.num_stages))
    latency = data.draw(st.sampled_from([0.0, 0.25, 2.0]))
    transfer = Transfer(Link(latency, bandwidth=4.0), {(0, 1): Link(3.0)})
    lists = schedule.tasks(microbatches)
    step = simulate(schedule, costs, transfer, num_microbatches=microbatches)
    times = brute_force(lists, costs, transfer)
    got = {event.task: (event.start, event.end) for events in step.events for event in events}
    assert got == times
    assert step.makespan == max(end for _, end in times.values())


@settings(max_examples=60)
@given(st.data(), schedules(), st.integers(1, 8))
def test_figures_agree_with_the_events(data, schedule, microbatches):
    costs = data.draw(costs_for(schedule.num_stages))
    step = simulate(schedule, costs, 0.5, num_microbatches=microbatches)
    assert 0 <= step.bubble <= 1
    for rank, events in enumerate(step.events):
        assert all(a.end <= b.start for a, b in itertools.pairwise(events))
        memory = [held for _, held in step.memory(rank)]
        assert abs(memory[-1] if memory else 0.0) < 1e-9  # everything is given back


@given(schedules(), st.integers(1, 8))
def test_merged_order_is_by_start_and_legal_in_one_process(schedule, microbatches):
    order = merge_order(schedule.tasks(microbatches))
    again = CustomSchedule([[task for r, task in order if r == rank] for rank in range(schedule.num_ranks)])
    assert again.tasks(microbatches) == normalize(schedule.tasks(microbatches))
    assert again.splits_backward == (schedule.splits_backward and schedule.num_stages > 1)


@given(st.data(), schedules(max_ranks=4), st.integers(1, 5))
def test_a_broken_schedule_is_never_accepted(data, schedule, microbatches):
    """Dropping or doubling a task is refused; swapping two is refused or leaves a legal order."""
    lists = schedule.tasks(microbatches)
    rank = data.draw(st.integers(0, len(lists) - 1))
    at = data.draw(st.integers(0, len(lists[rank]) - 1))
    dropped = [list(tasks) for tasks in lists]
    del dropped[rank][at]
    doubled = [list(tasks) for tasks in lists]
    doubled[rank].insert(at, lists[rank][at])
    for broken in (dropped, doubled):
        with pytest.raises(ValueError, match=r"missing|twice|deadlock|both B and I"):
            validate(broken, microbatches, num_stages=schedule.num_stages)
