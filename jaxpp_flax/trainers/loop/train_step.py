"""Run one optimizer step: from a batch to the next state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.planning.profile import StepProfile, profile_of
from jaxpp_flax.trainers.data.batch import describe_batch
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding, compared_rows, examples_of_a_device
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.mesh import describe_mesh
from jaxpp_flax.trainers.metrics.clock import Clock, timed
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.stages.assigner import Assigner
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.stages.stage_table import stage_table
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.step.nonfinite import StepsUnderWay

__all__ = ["TrainStep"]


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Compiles and runs training steps.

    Args:
      check_saves: called before each step.
      max_batch_shapes: see `Training`.
    """

    scheduling: Scheduling
    assigner: Assigner
    rows: BatchSharding
    executables: CompiledSteps
    held: StateHolder
    under_way: StepsUnderWay
    trained_on: BatchComparison
    display: Display
    check_saves: Callable[[], None]
    clock: Clock
    max_batch_shapes: int

    @without_ambient_mesh
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """As `PipelineTrainer.compile`."""
        whole = self.rows.whole(batch, global_batch_size)
        microbatches = self.rows.split(whole)
        if self.executables.has_training(microbatches):
            return self._compiled(microbatches, whole)
        scheduling, display = self.scheduling, self.display
        count = sum(leaf.size for leaf in jax.tree.leaves(self.held.memory.params))
        with display.phase(f"compiling {scheduling.num_stages} stages, {count:,} parameters"):
            compiled = self._compiled(microbatches, whole)
        if scheduling.mesh is not None:
            schedule, mesh = scheduling.pipeline("the table of stages")
            title = f"{schedule.num_stages} stages on {describe_mesh(mesh)}, {schedule!r}"
            memory = {of.rank: of.held_bytes for of in compiled.memory_analysis()}
            plan = self.assigner.plan_of(schedule, scheduling.num_microbatches)
            table = stage_table(compiled.stages, memory, title, schedule, scheduling.num_microbatches, plan)
            display.message(table)
            if plan is not None and self.assigner.note_told(plan):
                display.message(plan.table())
        return compiled

    @without_ambient_mesh
    @timed("dispatch")
    def step(self, batch: Any, whole: Any) -> dict[str, Any]:
        """As `PipelineTrainer.train_step`."""
        compiled, microbatches = self._prepare(batch, whole)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.held.step + 1):
            results = compiled(self.held.memory, microbatches)
        return self.finish(results)

    def _prepare(self, batch: Any, whole: Any) -> tuple[Any, Any]:
        """Return the compiled step and its microbatches, once the processes' batches are compared."""
        microbatches = self.rows.split(whole)
        compiled = self._compiled(microbatches, whole)
        self.check_saves()
        if whole is not batch:
            return compiled, compared_rows(compiled, batch, microbatches, self.trained_on)
        self.trained_on.before(microbatches)
        return compiled, microbatches

    def _compiled(self, microbatches: Any, whole: Any) -> Any:
        return self.executables.for_training(microbatches, lambda known: self._announce_shape(whole, known))

    def _announce_shape(self, whole: Any, known: int) -> None:
        """Tell that a batch of another shape than `known` ones will be compiled; refuse one too many."""
        if known >= self.max_batch_shapes:
            raise BatchError(
                f"a batch of another shape, after {known}: {describe_batch(whole)}. Each shape is compiled on its own. "
                f"Pad the batches to at most {known} lengths, or allow more shapes: "
                f"`training=Training(max_batch_shapes={2 * known})`."
            )
        if known:
            self.display.message(
                f"compiling for another shape of batches ({known + 1} of at most {self.max_batch_shapes}): "
                f"{describe_batch(whole)}"
            )

    def finish(self, results: Any) -> dict[str, Any]:
        """Use the results of a step: hold its state, and check its metrics."""
        state, metrics = results
        self.held.advance(state)
        self.trained_on.after(metrics["loss"], self.held.step)
        with self.clock.part("device"):
            self.under_way.add(self.held.step, metrics)
        return metrics

    @without_ambient_mesh
    def profile_step(self, batch: Any, *, global_batch_size: int | None) -> StepProfile:
        """As `PipelineTrainer.profile_step`."""
        schedule, mesh = self.scheduling.pipeline("profile_step")
        compiled, microbatches = self._prepare(batch, self.rows.whole(batch, global_batch_size))
        jax.block_until_ready(jax.tree.leaves(self.held.memory))  # steps under way would be measured with it
        results, timings = compiled.profile(self.held.memory, microbatches)
        metrics = self.finish(results)
        examples = examples_of_a_device(microbatches, mesh)
        return profile_of(metrics, timings, compiled.stages, schedule, self.scheduling.num_microbatches, examples)
