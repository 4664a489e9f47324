"""The options of memory: what a step keeps, recomputes or moves to the host."""

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
      remat: "full" recomputes the values between two marks in the backward pass; a `jax.checkpoint` policy selects the
        values to keep. `PipelineStage(remat=)` sets this for one block. None recomputes nothing.
      residuals: what each stage does with the values that its forward pass keeps for its backward pass: keep, recompute
        or offload them (`jaxpp_flax.schedules.ResidualPlan`). None keeps them on the devices.
      optimizer_state: the memory kind that holds the optimizer's state between steps: "pinned_host" is host memory.
        Each step copies the state to the devices and back, a few leaves at a time; the results are the same. Scalars
        (counters, hyperparameters) stay on the devices. None: the devices' own memory.

    Raises:
      TypeError, ValueError: if a field has a value that does not fit; the message names the field.

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
