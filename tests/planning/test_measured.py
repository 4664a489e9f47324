"""Costs from measured steps."""

import pytest

from jaxpp_flax.planning import measured_costs
from jaxpp_flax.schedules import Costs, Event, ScheduleError, Std1F1B, ZeroBubble, simulate
from jaxpp_flax.schedules.task import forward


def test_a_split_step_gives_back_its_costs():
    costs = Costs(forward=[1.0, 2.0, 1.5], backward_input=[1.1, 2.2, 1.6], backward_weight=[0.9, 1.8, 1.4])
    step = simulate(ZeroBubble(3), costs, num_microbatches=5)
    again = measured_costs(step, activation=[1, 2, 3], sent=4.0)
    assert again.forward == pytest.approx(costs.forward)
    assert again.backward_input[1:] == pytest.approx(costs.backward_input[1:])
    assert again.backward_weight[1:] == pytest.approx(costs.backward_weight[1:])
    assert again.backward[0] == pytest.approx(2.0)  # stage 0 is whole
    assert (again.activation, again.sent) == ((1, 2, 3), 4.0)
    assert simulate(ZeroBubble(3), again, num_microbatches=5).makespan == pytest.approx(step.makespan)


def test_the_median_is_taken():
    step = simulate(Std1F1B(1), num_microbatches=5)
    events = [[Event(e.task, e.rank, e.start, e.end + (100 if i == 2 else 0)) for i, e in enumerate(step.events[0])]]
    costs = measured_costs(events)
    assert costs.forward == pytest.approx((1.0,))
    assert costs.backward == pytest.approx((2.0,))


def test_what_was_not_measured_is_said():
    with pytest.raises(ScheduleError, match="run at least one step"):
        measured_costs([])
    with pytest.raises(ScheduleError, match="stage 0 has no measured backward"):
        measured_costs([[Event(forward(0, 0), 0, 0.0, 1.0)]])
