"""The schedule that a trainer runs, its ranks, and the change to another schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpp_flax.schedules import ResidualPlan, Schedule, ScheduleError
from jaxpp_flax.trainers.mesh import num_batch_shards
from jaxpp_flax.trainers.setup import choose_ranks


class Scheduling:
    """The current schedule and its ranks.

    The arguments are those of the trainer; `residuals` is the field of its `memory=`.

    Example:
      >>> scheduling = Scheduling(4, "1f1b", num_stages=2, mesh_axes={})
      >>> scheduling.use("interleaved_1f1b", num_stages=4)
      >>> scheduling.num_stages, scheduling.schedule.num_ranks, scheduling.batch_shards
      (4, 2, 1)
    """

    def __init__(
        self,
        num_microbatches: int,
        schedule: Any,
        num_stages: int,
        num_ranks: int | None = None,
        mesh: Any = None,
        mesh_axes: Mapping[str, int] | None = None,
        residuals: ResidualPlan | None = None,
    ) -> None:
        self.schedule, self.mesh = choose_ranks(schedule, num_stages, num_microbatches, num_ranks, mesh, mesh_axes)
        self.num_stages, self.num_microbatches, self._residuals = num_stages, num_microbatches, residuals
        if self.mesh is not None and residuals is not None:
            residuals.check(num_stages)
        self.batch_shards = num_batch_shards(self.mesh)  # the devices of a stage that divide a microbatch's examples

    def use(self, schedule: Any, num_stages: int | None = None) -> None:
        """As `PipelineTrainer.use_schedule`."""
        if self.mesh is None:
            raise ValueError(no_pipeline(f"use_schedule({schedule!r})"))
        if num_stages is None:
            num_stages = schedule.num_stages if isinstance(schedule, Schedule) else self.num_stages
        if self._residuals is not None:
            try:
                self._residuals.check(num_stages)
            except ScheduleError as error:
                raise ScheduleError(
                    f"use_schedule({schedule!r}) with Memory(residuals=): {error} The plan holds for all schedules of "
                    f"the trainer: keep num_stages={self.num_stages}, or make a trainer with another plan."
                ) from error
        made, _ = choose_ranks(schedule, num_stages, self.num_microbatches, self.mesh.mpmd_dim, self.mesh, None)
        self.schedule, self.num_stages = made, num_stages


def no_pipeline(what: str) -> str:
    """Return the message for a call that needs ranks, if there are none."""
    return (
        f"{what} needs a pipeline, but with num_stages=1 on one device the step runs under plain jax.jit. Give "
        "num_stages=2 or more, or mesh={'data': 1} for a pipeline of one rank."
    )
