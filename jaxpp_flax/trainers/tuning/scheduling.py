"""The trainer's side of schedules and assignments: who runs what, measuring a step, changing or finding a schedule."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax

from jaxpp_flax.assignment import CutPolicy, Plan, even
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.assigner import Assigner, Pipeline, kept_bytes
from jaxpp_flax.trainers.data.batch import split_batch
from jaxpp_flax.trainers.mesh import wrap_mesh
from jaxpp_flax.trainers.setup import choose_ranks
from jaxpp_flax.trainers.step.compilation import Backend
from jaxpp_flax.trainers.tuning.auto_schedule import AutoSchedule, ScheduleReport, ScheduleTuner
from jaxpp_flax.trainers.tuning.profiling import StepProfile, profile_of

__all__ = ["Scheduled"]


class Scheduled(abc.ABC):
    """What `PipelineTrainer` does with schedules beside running them."""

    schedule: Schedule | None
    mesh: MpmdMesh | None
    num_stages: int
    num_microbatches: int
    _assigner: Assigner
    _backend: Backend
    _tuner: ScheduleTuner | None
    _shards: int
    _state: Any

    def _init_schedule(
        self,
        schedule: Any,
        num_stages: int,
        num_ranks: int | None,
        mesh: Any,
        mesh_axes: Mapping[str, int] | None,
    ) -> None:
        """Choose the schedule, the mesh and, for `"auto"`, what finds a better one.

        Raises:
          ValueError, MeshError: see `choose_ranks`.
        """
        auto = AutoSchedule() if schedule == "auto" else schedule
        if isinstance(auto, AutoSchedule):
            of_mesh = wrap_mesh(mesh, None).mpmd_dim if mesh is not None else num_stages
            schedule = auto.first(num_stages, num_ranks if num_ranks is not None else of_mesh)
        chosen = choose_ranks(schedule, num_stages, self.num_microbatches, num_ranks, mesh, mesh_axes)
        self.schedule, self.mesh = chosen
        self.num_stages = num_stages
        self._tuner = None
        if isinstance(auto, AutoSchedule) and self.schedule is not None and self.mesh is not None:
            if self.mesh.jax_mesh.is_multi_process:
                raise ValueError(
                    "schedule='auto' measures steps, but the devices of this mesh belong to several processes, which "
                    "would measure, and choose, differently. Find a schedule in one process, or with "
                    "`jaxpp_flax.schedules.search`, and pass it to all of them."
                )
            self._tuner = ScheduleTuner(auto, self.schedule)

    @property
    def plan(self) -> Plan | None:
        """Which block runs on which stage; None before the training step is compiled, and without a pipeline."""
        return self._assigner.plan_of(self.schedule, self.num_microbatches)

    def _cut_policy(self, kind: str, microbatches: Any) -> CutPolicy:
        """Which marks cut the step of this kind ("train", or one of inference)."""
        if self.schedule is None or self.mesh is None:
            return even()  # plain `jax.jit` asks nobody
        mesh, specs = self.mesh, self._backend.state_specs
        pipeline = Pipeline(
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            mesh=mesh,
            kept=lambda: kept_bytes(self._state, specs, microbatches, mesh),
        )
        return self._assigner.policy(pipeline, training=kind == "train")

    @property
    def schedule_report(self) -> ScheduleReport | None:
        """With `schedule="auto"`: what was found, predicted and measured; None before the search."""
        return self._tuner.report if self._tuner is not None else None

    def use_schedule(self, schedule: Any, num_stages: int | None = None) -> None:
        """Go on with another schedule on the same ranks; the next step compiles it and moves what lies elsewhere.

        The training goes on as if nothing had happened: results do not depend on the schedule.

        Args:
          schedule: a name or a `Schedule`.
          num_stages: stages to cut the model into, by default as many as now (or as the `Schedule` has).

        Raises:
          ValueError: if it does not fit the ranks or the microbatches, or there are no ranks.
        """
        if self.mesh is None:
            raise ValueError(_no_pipeline(f"use_schedule({schedule!r})"))
        if num_stages is None:
            num_stages = schedule.num_stages if isinstance(schedule, Schedule) else self.num_stages
        made, _ = choose_ranks(schedule, num_stages, self.num_microbatches, self.mesh.mpmd_dim, self.mesh, None)
        self.schedule, self.num_stages = made, num_stages

    def profile_step(self, batch: Any) -> StepProfile:
        """One real optimizer step, each task of which is measured; it trains, exactly as `train_step` does.

        The state goes forward by one step, and state and metrics are those that `train_step` would have given. Each
        rank runs in a thread of its own and waits for each task, so this step is slower than others; the first run of
        a task is slower still, so measure a later step than the first.

        Returns:
          The metrics, the measured step and its simulation: `trainer.profile_step(batch).draw("step.svg")`.

        Raises:
          ValueError: without a pipeline; or whatever `train_step` raises.
        """
        microbatches = split_batch(batch, self.num_microbatches, self._shards)
        compiled = self._train_executable(microbatches)
        if self.mesh is None or self.schedule is None:
            raise ValueError(_no_pipeline("profile_step"))
        jax.block_until_ready(jax.tree.leaves(self._state))  # steps under way would be measured with it
        results, timings = compiled.profile(self._state, microbatches)
        metrics = self._finish_step(results, microbatches)
        return profile_of(metrics, timings, compiled.stages, self.schedule, self.num_microbatches)

    @abc.abstractmethod
    def _train_executable(self, microbatches: Any) -> Any: ...

    @abc.abstractmethod
    def _finish_step(self, results: Any, microbatches: Any) -> dict[str, Any]: ...


def _no_pipeline(what: str) -> str:
    return (
        f"{what} needs a pipeline, but with num_stages=1 and without a mesh the step runs under plain jax.jit. Give "
        "num_stages=2 or more, or mesh={} for a pipeline of one rank."
    )
