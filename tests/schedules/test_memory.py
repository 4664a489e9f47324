"""The simulator's memory is the table of costs, task by task."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.schedules import Costs, simulate
from tests.schedules.helpers import costs_for, schedules


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
