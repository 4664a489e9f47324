"""Even or balanced: the simulated step decides, ties and small gains go to even stages."""

from __future__ import annotations

import pytest

from jaxpp_flax.assignment.balancing import Balance, balance
from jaxpp_flax.assignment.simulated_step import StepTime
from jaxpp_flax.assignment.stages_choice import MARGIN, choose
from jaxpp_flax.schedules import Interleaved1F1B, Schedule, Std1F1B


def step_of(costs: list[float], schedule: Schedule, num_microbatches: int = 8) -> StepTime:
    return StepTime(schedule=schedule, num_microbatches=num_microbatches, forward=costs, backward=[0.0] * len(costs))


def refuse_search() -> Balance:
    raise AssertionError("no search is needed")


def balanced(costs: list[float], num_stages: int) -> Balance:
    found = balance(costs, range(num_stages))
    assert found is not None
    return found


def test_identical_blocks_stay_even_without_a_search():
    for schedule, even in ((Std1F1B(4), [2, 2, 2, 2]), (Interleaved1F1B(8, 2), [1] * 8)):
        stages, choice = choose(even, step_of([1.0] * 8, schedule), refuse_search)
        assert stages is None
        assert (choice.chosen, choice.searched) == ("even", False)
        assert choice.even == pytest.approx(choice.balanced)


def test_a_gain_below_the_margin_stays_even():
    # A last block a little larger: the search finds nothing that is worth other sizes.
    costs = [1.0] * 7 + [1.4]
    step = step_of(costs, Std1F1B(4), 64)
    stages, choice = choose([2, 2, 2, 2], step, lambda: balanced(costs, 4))
    assert stages is None
    assert choice.searched
    assert choice.balanced >= (1 - MARGIN) * choice.even


def test_a_gain_above_the_margin_is_balanced():
    costs = [1.0, 1.0, 2.0, 4.0, 4.0, 2.0, 1.0, 1.0]
    step = step_of(costs, Std1F1B(4), 64)
    stages, choice = choose([2, 2, 2, 2], step, lambda: balanced(costs, 4))
    assert stages is not None
    assert stages.sizes == (3, 1, 1, 3)
    assert choice.chosen == "balanced"
    assert choice.balanced == step((3, 1, 1, 3)) < 0.75 * choice.even
    assert "balanced stages; simulated step: even" in choice.text("FLOP")


def test_one_microbatch_gains_nothing():
    """Then the ranks run one after another, however the blocks are divided."""
    costs = [1.0, 1.0, 1.0, 9.0]
    stages, choice = choose([2, 2], step_of(costs, Std1F1B(2), 1), refuse_search)
    assert stages is None
    assert choice.even == choice.balanced == 12.0


def test_a_limit_and_a_cut_that_is_refused():
    costs = [1.0, 1.0, 1.0, 9.0]
    step, found = step_of(costs, Std1F1B(2)), balanced(costs, 2)
    stages, choice = choose([2, 2], step, lambda: found, can_cut=lambda sizes: False)
    assert stages is None
    assert "even stages (the model cannot be cut into the balanced ones)" in choice.text("")
    equal = step_of([1.0] * 4, Std1F1B(2))
    stages, choice = choose([2, 2], equal, lambda: found, fits=lambda sizes: False)
    assert stages is found
    assert "balanced stages (even stages exceed memory_limit)" in choice.text("")
