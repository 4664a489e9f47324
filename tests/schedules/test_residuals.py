"""What a stage does with its residuals."""

import pytest

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals


@pytest.mark.parametrize("share", [0.0, 0.25, 1 / 3, 0.5, 0.9, 1.0])
def test_a_share_of_the_microbatches_is_offloaded(share):
    chosen = [StageResiduals(offload=share).offloads(m) for m in range(120)]
    assert sum(chosen) == round(120 * share)
    for start in range(0, 108, 12):  # spread evenly: no window of twelve differs by more than one
        assert abs(sum(chosen[start : start + 12]) - 12 * share) <= 1


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_is_refused(share):
    with pytest.raises(ScheduleError, match="from 0 to 1"):
        StageResiduals(offload=share)


@pytest.mark.parametrize("word", ["cheap", "", 2])
def test_a_word_for_recomputation_is_refused(word):
    with pytest.raises(ScheduleError, match=f"recompute={word!r}: use True or False. To keep some values .* a policy"):
        StageResiduals(recompute=word)


def test_a_plan_has_an_entry_for_each_stage():
    plan = ResidualPlan([KEEP, StageResiduals(recompute=True)])
    assert plan.stages == (KEEP, plan.of(1))
    assert not plan.is_kept
    assert ResidualPlan.keep(3) == ResidualPlan((KEEP, KEEP, KEEP))
    with pytest.raises(ScheduleError, match="an entry for each stage"):
        ResidualPlan(())
