"""The schedule of a function without a loop, and what it makes of stages without work."""

from __future__ import annotations

import pytest

from jaxpp_flax.engine.passes.loop.open_loops import OnePass
from jaxpp_flax.schedules import ScheduleError


@pytest.mark.parametrize(
    ("written", "live", "stages"),
    [(3, 3, 4), (4, 4, 4), (4, 3, 4), (4, 2, 3), (3, 0, 1), (2, 1, 4), (9, 5, 4)],
)
def test_dead_stages_are_left_out_if_enough_marks_are_written(written: int, live: int, stages: int):
    schedule = OnePass(4).without_dead_stages(written, live)
    assert (schedule.num_stages, schedule.num_ranks) == (stages, 4)
    assert [len(tasks) for tasks in schedule.tasks(1)] == [2] * stages + [0] * (4 - stages)


def test_each_rank_runs_its_stages_forward_then_backward():
    assert str(OnePass(4, 2).tasks(1)[1]) == "[fwd_1__0, fwd_3__0, bwd_3__0, bwd_1__0]"
    with pytest.raises(ScheduleError, match="cannot be divided evenly"):
        OnePass(5, 4)
