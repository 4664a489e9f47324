"""The walk of memory: by hand, and the same bytes from every side that counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.schedules import Costs, GPipe, ResidualPlan, StageResiduals, Std1F1B, ZeroBubble, simulate
from jaxpp_flax.schedules.memory import StageBytes, walk_rank
from jaxpp_flax.schedules.order import arrivals
from jaxpp_flax.schedules.residuals import KEEP, host_copies
from tests.schedules.helpers import costs_for, schedules


def test_a_split_backward_by_hand():
    """Rank 1 of two runs F I F I W W: at its second F it holds a microbatch, and what the first W reads."""
    stage = StageBytes(activation=8.0, saved=8.0, kept=3.0, received=2.0, passing=1.0)
    tasks = ZeroBubble(2).tasks(2)
    assert [task.kind.value for task in tasks[1]] == ["F", "I", "F", "I", "W", "W"]
    alone = walk_rank(tasks[1], [stage] * 2).devices
    assert (alone.peak, alone.live, alone.at_peak) == (
        3.0 + 8.0 + 1.0,
        0.0,
        {"residuals": 11.0, "arrays between stages": 1.0},
    )
    # The second input arrives before the first I; when its F starts, it is a residual.
    beside = walk_rank(tasks[1], [stage] * 2, arrivals=arrivals(tasks)[1]).devices
    assert (beside.peak, beside.live) == (12.0, 0.0)


def test_what_moves_to_the_host_by_hand():
    """GPipe on a rank: F0 F1 F2 F3, then the backwards; each microbatch's 4 bytes leave and come back."""
    stages = [StageBytes(activation=4.0, saved=4.0)] * 2
    tasks, plan = GPipe(2).tasks(4)[0], ResidualPlan([StageResiduals(offload=1.0), KEEP], offload_within=1)
    rank = walk_rank(tasks, stages, copies=host_copies(tasks, plan))
    # In front of F2, microbatch 0 has left; in front of F3 it comes back, and microbatch 1 has left.
    assert (rank.devices.peak, rank.devices.live) == (12.0, 0.0)
    assert (rank.host.peak, rank.host.live) == (12.0, 0.0)
    assert walk_rank(tasks, stages).devices.peak == 16.0


def test_a_stage_that_recomputes_holds_its_activation_in_its_backward():
    again = StageBytes(activation=8.0, saved=1.0)
    assert walk_rank(Std1F1B(3).tasks(4)[0], [again] * 3).devices.peak == 1.0 * 3 + 7.0


@given(st.data(), schedules(max_ranks=4), st.integers(1, 6))
def test_every_count_of_held_activations_is_the_table_of_costs(data, schedule, microbatches):
    costs = data.draw(costs_for(schedule.num_stages))
    table = costs.table(schedule.num_stages)
    step = simulate(schedule, costs, num_microbatches=microbatches)
    counted = simulate(schedule, Costs(), num_microbatches=microbatches)
    for rank, tasks in enumerate(schedule.tasks(microbatches)):
        held = peak = 0.0
        for task in tasks:
            added, removed = table.stages[task.stage].changes(task)
            peak = max(peak, held + added)
            held += added + removed
        assert step.peak_memory[rank] == peak
        # One unit for each microbatch of each stage.
        most = [schedule.max_live_microbatches(stage, microbatches) for stage in schedule.stages_of(rank)]
        assert max(most, default=0) <= counted.peak_memory[rank] <= sum(most)
