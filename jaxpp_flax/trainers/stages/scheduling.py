"""The schedule that a trainer runs, its ranks, and the change to another schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.schedules import ResidualPlan, Schedule, ScheduleError, by_name
from jaxpp_flax.trainers.mesh import build_mesh, default_axes, num_batch_shards, wrap_mesh


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
        self.num_stages, self.num_microbatches, self.residuals = num_stages, num_microbatches, residuals
        if self.mesh is not None and residuals is not None:
            residuals.check(num_stages)
        self.batch_shards = num_batch_shards(self.mesh)  # the devices of a stage that divide a microbatch's examples

    def pipeline(self, what: str) -> tuple[Schedule, MpmdMesh]:
        """Return the schedule and the mesh; refuse the call `what`, which needs ranks, if there are none.

        Raises:
          ValueError: with one stage on one device.
        """
        if self.schedule is None or self.mesh is None:
            raise ValueError(
                f"{what} needs a pipeline, but with num_stages=1 on one device the step runs under plain jax.jit. Give "
                "num_stages=2 or more, or mesh={'data': 1} for a pipeline of one rank."
            )
        return self.schedule, self.mesh

    def use(self, schedule: Any, num_stages: int | None = None) -> None:
        """As `PipelineTrainer.use_schedule`."""
        _, mesh = self.pipeline(f"use_schedule({schedule!r})")
        if num_stages is None:
            num_stages = schedule.num_stages if isinstance(schedule, Schedule) else self.num_stages
        if self.residuals is not None:
            try:
                self.residuals.check(num_stages)
            except ScheduleError as error:
                raise ScheduleError(
                    f"use_schedule({schedule!r}) with Memory(residuals=): {error} All schedules of the trainer use the "
                    f"same plan: keep num_stages={self.num_stages}, or make a trainer with another plan."
                ) from error
        made, _ = choose_ranks(schedule, num_stages, self.num_microbatches, mesh.mpmd_dim, mesh, None)
        self.schedule, self.num_stages = made, num_stages


def choose_ranks(
    schedule: Any,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None,
    mesh: Any,
    mesh_axes: Mapping[str, int] | None,
) -> tuple[Schedule | None, MpmdMesh | None]:
    """Return the schedule and the mesh; both None if one stage on one device runs under plain `jax.jit`.

    Raises:
      ValueError: if the schedule is unknown, or does not fit stages, ranks or microbatches.
      MeshError: if devices, mesh and ranks do not fit.
    """
    if isinstance(schedule, Schedule):
        made = schedule
        if made.num_stages != num_stages:
            raise ValueError(
                f"the schedule {made!r} is for {made.num_stages} stages, but num_stages={num_stages}. Make them equal."
            )
        if num_ranks is not None and made.num_ranks != num_ranks:
            raise ValueError(
                f"the schedule {made!r} is for {made.num_ranks} ranks, but num_ranks={num_ranks}. Make them equal."
            )
    elif isinstance(schedule, str):
        wrapped = wrap_mesh(mesh, None) if mesh is not None else None
        ranks = num_ranks if num_ranks is not None else (wrapped.mpmd_dim if wrapped is not None else None)
        made = by_name(schedule, num_stages, ranks)
    else:
        raise TypeError(
            f"schedule must be a name such as '1f1b' or a Schedule object, got {type(schedule).__name__}: "
            f"{schedule!r}. The names: jaxpp_flax.schedules.names()."
        )
    made.check(num_microbatches)
    if mesh is not None:
        return made, wrap_mesh(mesh, made.num_ranks)
    axes = default_axes(made.num_ranks) if mesh_axes is None else mesh_axes
    if num_stages == 1 and not axes:
        return None, None
    return made, build_mesh(made.num_ranks, axes)
