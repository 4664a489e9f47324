"""A long step, predicted from two shorter ones: once every rank is busy, a schedule repeats itself."""

from __future__ import annotations

from dataclasses import replace

from jaxpp_flax.planning.model import Prediction, StepModel
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["prediction_of", "shortened"]

_SIMULATED = 4  # microbatches for each rank, beyond which a step only repeats itself


def prediction_of(model: StepModel, residuals: ResidualPlan) -> Prediction:
    """Return what `StepModel.predict` returns; a long step is predicted from two shorter ones.

    Once every rank is busy, a schedule repeats itself, so seconds and bytes are linear in the number of microbatches.

    Example:
      >>> from jaxpp_flax.planning.loads import Hardware, StageLoad
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> load, card = StageLoad(forward=1.0, backward=2.0, residual_bytes=8.0), Hardware(flops=1.0, host_bandwidth=1.0)
      >>> step = StepModel(schedule=Std1F1B(4), num_microbatches=64, stages=[load] * 4, hardware=card)
      >>> prediction_of(step, ResidualPlan.keep(4)) == step.predict(ResidualPlan.keep(4))
      True
    """
    count, short = model.num_microbatches, _short(model)
    longer = short + model.schedule.num_ranks
    if count <= longer:
        return model.predict(residuals)
    one, two = (replace(model, num_microbatches=each).predict(residuals) for each in (short, longer))
    share = (count - short) / (longer - short)

    def mixed(a: float, b: float) -> float:
        return a + (b - a) * share

    return Prediction(
        seconds=mixed(one.seconds, two.seconds),
        peak_bytes=tuple(map(mixed, one.peak_bytes, two.peak_bytes)),
        host_bytes=tuple(map(mixed, one.host_bytes, two.host_bytes)),
        moved=mixed(one.moved, two.moved),
        recomputation=mixed(one.recomputation, two.recomputation),
        state_host_bytes=one.state_host_bytes,
    )


def _short(model: StepModel) -> int:
    """Return the microbatches of a short step: with the remainder by ranks, on which schedules depend, of the whole."""
    ranks = model.schedule.num_ranks
    return _SIMULATED * ranks + model.num_microbatches % ranks


def shortened(model: StepModel) -> StepModel:
    """Return the model of a step with at most so many microbatches, whose memory is walked quickly."""
    return replace(model, num_microbatches=min(model.num_microbatches, _short(model)))
