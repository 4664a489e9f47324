"""Costs from measured steps."""

from types import SimpleNamespace

import pytest

from jaxpp_flax.planning.profile import task_costs
from jaxpp_flax.schedules import Costs, Event, Std1F1B, ZeroBubble, simulate


def stage(activation=1, sent=0):
    return SimpleNamespace(activation_bytes=activation, weight_bytes=activation, sent_bytes=sent)


def test_a_split_step_gives_back_its_costs():
    costs = Costs(forward=[1.0, 2.0, 1.5], backward_input=[1.1, 2.2, 1.6], backward_weight=[0.9, 1.8, 1.4])
    step = simulate(ZeroBubble(3), costs, num_microbatches=5)
    again = task_costs([step.events], [stage(held, 4) for held in (1, 2, 3)])
    assert again.forward == pytest.approx(costs.forward)
    assert again.backward_input[1:] == pytest.approx(costs.backward_input[1:])
    assert again.backward_weight[1:] == pytest.approx(costs.backward_weight[1:])
    assert again.backward[0] == pytest.approx(2.0)  # stage 0 is whole
    assert (again.activation, again.sent) == ((1, 2, 3), (4, 4, 4))
    assert simulate(ZeroBubble(3), again, num_microbatches=5).makespan == pytest.approx(step.makespan)


def test_the_median_is_taken():
    step = simulate(Std1F1B(1), num_microbatches=5)
    events = [[Event(e.task, e.rank, e.start, e.end + (100 if i == 2 else 0)) for i, e in enumerate(step.events[0])]]
    costs = task_costs([events], [stage()])
    assert costs.forward == pytest.approx((1.0,))
    assert costs.backward == pytest.approx((2.0,))
