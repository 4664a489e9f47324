"""When a rank gathers its parameters, and what it holds: by hand."""

from __future__ import annotations

import pytest

from jaxpp_flax.schedules import ScheduleError, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.gathers import Gathers
from jaxpp_flax.schedules.task import backward, forward

ONE_RANK = [forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0)]  # of two stages


def held(gathers: Gathers, tasks) -> list[tuple[str, int, int]]:
    return [(each.name, each.gather_before, each.read_last) for each in gathers.held(tasks)]


def test_once_in_a_step_or_in_every_task():
    stages = [{"a": 4.0}, {"b": 4.0}]
    assert held(Gathers(stages, "step"), ONE_RANK) == [("a", 0, 3), ("b", 1, 2)]
    assert Gathers(stages, "step").in_every_task(0) == 0.0
    assert held(Gathers(stages, "microbatch"), ONE_RANK) == []
    assert Gathers(stages, "microbatch").in_every_task(0) == 4.0


def test_stages_of_a_rank_share_a_parameter_of_one_name():
    assert held(Gathers([{"tied": 4.0}, {"tied": 4.0}], "step"), ONE_RANK) == [("tied", 0, 3)]


def test_weight_gradients_read_no_parameter():
    tasks = ZeroBubble(2).tasks(2)[1]  # F I F I W W
    assert held(Gathers([{}, {"a": 1.0}], "step"), tasks) == [("a", 0, 3)]
    assert Gathers([{"a": 1.0}, {}], "step").held(Std1F1B(2).tasks(2)[1]) == ()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([{"a": -1.0}],), ScheduleError, "'a' of stage 0 has -1.0 bytes; give 0 or more"),
        (([{"a": 1.0}], "step", 0.0), ScheduleError, "bandwidth=0.0; it must be a number above 0"),
        (([{"a": 1.0}], "once"), ValueError, "fsdp='once' is no known setting"),
        (([{"a": 1.0}], 4), ValueError, "fsdp=4 is no known setting"),
    ],
)
def test_what_cannot_be_gathered(arguments, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        Gathers(*arguments)
