"""When a rank gathers its parameters, and what it holds: by hand."""

from __future__ import annotations

import pytest

from jaxpp_flax.schedules import GPipe, ScheduleError, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.gathers import Gathers, gathered_inside
from jaxpp_flax.schedules.task import backward, forward

ONE_RANK = [forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0)]  # of two stages


def windows(gathers: Gathers, tasks) -> list[tuple[str, int, int]]:
    return [(w.name, w.gather_before, w.read_last) for w in gathers.windows(tasks)]


def test_once_in_a_step_or_once_in_a_window():
    stages = [{"a": 4.0}, {"b": 4.0}]
    assert windows(Gathers(stages, "step"), ONE_RANK) == [("a", 0, 3), ("b", 1, 2)]
    assert windows(Gathers(stages, 8), ONE_RANK) == [("a", 0, 3), ("b", 1, 2)]
    # With room for one of them, the first stage's is gathered again for its backward.
    assert windows(Gathers(stages, 4), ONE_RANK) == [("a", 0, 0), ("b", 1, 2), ("a", 3, 3)]
    assert windows(Gathers(stages, "microbatch"), ONE_RANK) == []


def test_stages_of_a_rank_share_a_parameter_of_one_name():
    assert windows(Gathers([{"tied": 4.0}, {"tied": 4.0}], "step"), ONE_RANK) == [("tied", 0, 3)]


def test_what_does_not_fit_is_gathered_inside_each_task():
    assert gathered_inside({"a": 4, "b": 6, "c": 2}, 8) == ["a"]
    gathers = Gathers([{"a": 4.0, "b": 6.0, "c": 2.0}], 8)
    assert (gathers.inside(0), gathers.reduced(0)) == (4.0, 0.0)
    assert windows(gathers, [forward(0, 0), backward(0, 0)]) == [("b", 0, 1), ("c", 0, 1)]
    every = Gathers([{"a": 4.0}], "microbatch")
    assert (every.inside(0), every.reduced(0)) == (4.0, 4.0)


def test_weight_gradients_read_no_parameter():
    tasks = ZeroBubble(2).tasks(2)[1]  # F I F I W W
    assert windows(Gathers([{}, {"a": 1.0}], "step"), tasks) == [("a", 0, 3)]
    assert Gathers([{"a": 1.0}, {}], "step").windows(Std1F1B(2).tasks(2)[1]) == ()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([{"a": -1.0}],), ScheduleError, "'a' of stage 0 has -1.0 bytes; give 0 or more"),
        (([{"a": 1.0}], "step", 0.0), ScheduleError, "bandwidth=0.0; it must be a number above 0"),
        (([{"a": 1.0}], "once"), ValueError, "fsdp='once' is no known setting"),
        (([{"a": 1.0}], 2.5), TypeError, "fsdp must be a word or a whole number of bytes"),
    ],
)
def test_what_cannot_be_gathered(arguments, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        Gathers(*arguments)


def test_a_second_look_at_the_same_tasks_is_the_same_object():
    gathers = Gathers([{"a": 1.0}, {}], "step")
    assert gathers.windows(GPipe(2).tasks(2)[0]) is gathers.windows(GPipe(2).tasks(2)[0])
