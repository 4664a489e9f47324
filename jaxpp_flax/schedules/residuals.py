"""What a stage does with the values that its forward keeps for its backward: keep, recompute or offload them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.schedules.errors import ScheduleError

__all__ = ["KEEP", "ResidualPlan", "StageResiduals"]


@dataclass(frozen=True, kw_only=True)
class StageResiduals:
    """The residuals of one stage: the values of its forward that its backward reads.

    Args:
      recompute: the backward computes the residuals again from the stage's inputs, and these are kept instead.
      offload: the share of microbatches, from 0 to 1, whose kept values move to host memory after the forward and
        come back before the backward. The microbatches are spread evenly.

    Raises:
      ScheduleError: for a share outside 0 to 1.

    Example:
      >>> half = StageResiduals(offload=0.5)
      >>> [half.offloads(microbatch) for microbatch in range(4)]
      [False, True, False, True]
      >>> StageResiduals(recompute=True).is_kept
      False
    """

    recompute: bool = False
    offload: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.offload <= 1:
            raise ScheduleError(f"offload={self.offload!r}: the share of offloaded microbatches is from 0 to 1.")

    @property
    def is_kept(self) -> bool:
        """True if all residuals stay on the devices."""
        return not self.recompute and not self.offload

    def offloads(self, microbatch: int) -> bool:
        """Return True if the values of this microbatch move to host memory."""
        return int((microbatch + 1) * self.offload) > int(microbatch * self.offload)


KEEP = StageResiduals()
"""All residuals stay on the devices."""


@dataclass(frozen=True)
class ResidualPlan:
    """The residuals of each stage.

    Raises:
      ScheduleError: without stages.

    Example:
      >>> plan = ResidualPlan((StageResiduals(offload=1.0), StageResiduals(recompute=True), KEEP))
      >>> plan.of(0).offload, plan.of(1).recompute, plan.of(2).is_kept
      (1.0, True, True)
      >>> ResidualPlan.keep(2).is_kept
      True
    """

    stages: tuple[StageResiduals, ...]

    def __init__(self, stages: Sequence[StageResiduals]) -> None:
        if not stages:
            raise ScheduleError("a ResidualPlan needs an entry for each stage, got none.")
        object.__setattr__(self, "stages", tuple(stages))

    @classmethod
    def keep(cls, num_stages: int) -> ResidualPlan:
        """Return the plan that keeps all residuals."""
        return cls((KEEP,) * num_stages)

    @property
    def is_kept(self) -> bool:
        """True if every stage keeps all residuals."""
        return all(stage.is_kept for stage in self.stages)

    def of(self, stage: int) -> StageResiduals:
        """Return the entry of a stage."""
        return self.stages[stage]
