"""The options of memory: what a step keeps, recomputes, or moves to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxpp_flax.engine.arrays.memory_kinds import check_kind
from jaxpp_flax.layers.remat import check_remat
from jaxpp_flax.schedules import ResidualPlan
from jaxpp_flax.trainers.options.base import Options, misfit

__all__ = ["Memory"]


@dataclass(frozen=True, kw_only=True)
class Memory(Options):
    """The options of memory, `memory=`. See `docs/guides/memory.md`.

    Args:
      remat: "full" recomputes the values between two marks in backward; a `jax.checkpoint` policy selects the values to
        keep. `PipelineStage(remat=)` sets it for one block.
      residuals: what each stage does with the values that its forward keeps for its backward: keep, recompute or
        offload them (`jaxpp_flax.schedules.ResidualPlan`). None keeps them on the devices.
      optimizer_state: the memory kind in which the optimizer's state lies between steps: "pinned_host" is host memory.
        Each step streams it to the devices, a few leaves at a time, and back; the results are the same. Single numbers
        (counters, hyperparameters) stay on the devices. None: the devices' own memory.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Memory(optimizer_state="pinned_host").optimizer_state
      'pinned_host'
      >>> from jaxpp_flax.schedules import ResidualPlan, StageResiduals
      >>> Memory(residuals=ResidualPlan([StageResiduals(offload=0.5), StageResiduals()])).residuals.of(0).offload
      0.5
    """

    remat: Literal["full"] | Callable[..., bool] | None = None
    residuals: ResidualPlan | None = None
    optimizer_state: str | None = None

    def __post_init__(self) -> None:
        check_remat(self.remat, "Memory")
        if not isinstance(self.residuals, (ResidualPlan, type(None))):
            wanted = "ResidualPlan([StageResiduals(...), ...]) with an entry for each stage, or None"
            raise misfit("residuals", self.residuals, wanted)
        kind = self.optimizer_state
        if kind is not None:
            if not isinstance(kind, str):
                raise misfit("optimizer_state", kind, "a memory kind such as 'pinned_host', or None")
            check_kind(kind, "Memory(optimizer_state=)")
