"""Run one optimizer step: from a batch to the next state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.trainers.assigner import Assigner
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding, compared_rows
from jaxpp_flax.trainers.loop.nonfinite import StepsUnderWay
from jaxpp_flax.trainers.loop.process_synchronization import BatchComparison, await_same_end
from jaxpp_flax.trainers.loop.progress import Display
from jaxpp_flax.trainers.mesh import describe_mesh
from jaxpp_flax.trainers.metrics.clock import Clock, timed
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps, stage_table
from jaxpp_flax.trainers.tuning.scheduling import Scheduling, no_pipeline
from jaxpp_flax.trainers.tuning.step_profile import StepProfile, profile_of

__all__ = ["TrainStep"]


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Compiles and runs training steps.

    Args:
      check_saves: called before each step.
      diagnose: makes the error for a first loss that is not finite, from the loss, the parameters and the rest of the
        model's state before that step, and the microbatches. None if such a loss is not an error.
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
    diagnose: Callable[[float, tuple[Any, Any] | None, Any], Exception] | None
    clock: Clock

    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """Compile the training step for batches like this one, and print the table of stages; nothing runs.

        Args:
          batch: arrays, or their shapes (`jax.ShapeDtypeStruct`).
          global_batch_size: as in `fit`.

        Returns:
          The compiled step: see `jaxpp_flax.engine` (or JAX, for one stage on one device).

        Raises:
          ValueError, TypeError: if model, loss, batch, stages, schedule or devices do not fit.
        """
        microbatches = self.rows.split(self.rows.whole(batch, global_batch_size))
        if self.executables.has_training(microbatches):
            return self.executables.for_training(microbatches)
        scheduling, display = self.scheduling, self.display
        count = sum(leaf.size for leaf in jax.tree.leaves(self.held.memory.params))
        with display.meter.phase(f"compiling {scheduling.num_stages} stages, {count:,} parameters"):
            compiled = self.executables.for_training(microbatches)
        if scheduling.mesh is not None:
            title = f"{scheduling.num_stages} stages on {describe_mesh(scheduling.mesh)}, {scheduling.schedule!r}"
            memory = {of.rank: of.argument_bytes + of.peak_bytes for of in compiled.memory_analysis()}
            plan = self.assigner.plan_of(scheduling.schedule, scheduling.num_microbatches)
            display.message(stage_table(compiled.stages, memory, title, plan))
            for plan in self.assigner.news():
                display.message(plan.table())
        return compiled

    @timed("dispatch")
    def step(self, batch: Any, whole: Any) -> dict[str, Any]:
        """Run one optimizer step on a batch. Batches with new shapes compile a new step first.

        Args:
          batch: leaves of shape (batch, ...); the whole batch, or this process's rows.
          global_batch_size: as in `fit`.

        Returns:
          Metrics of the whole batch, at least `loss`: values that behave like arrays (`float(metrics["loss"])`). The
          call does not wait for these values, but for the values of two steps before.

        Raises:
          BatchError: if the batch cannot be cut into microbatches, or lacks the rows that this process reads.
          NonFiniteLossError: if the first loss is not finite (the message names the origin), or if the loss of two
            steps before is not finite; see `Precision`.
          CheckpointSaveError: if a save in the background has failed since the last step.
          ValueError, TypeError: for other arguments that do not fit, before anything runs.
        """
        compiled, microbatches = self._prepare(batch, whole)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.held.step + 1):
            results = compiled(self.held.memory, microbatches)
        return self.finish(results, microbatches)

    def _prepare(self, batch: Any, whole: Any) -> tuple[Any, Any]:
        """Return the compiled step and its microbatches, once the processes' batches are compared."""
        microbatches = self.rows.split(whole)
        compiled = self.executables.for_training(microbatches)
        self.check_saves()
        if whole is not batch:
            return compiled, compared_rows(compiled, batch, microbatches, self.trained_on)
        self.trained_on.before(microbatches)
        return compiled, microbatches

    def finish(self, results: Any, microbatches: Any) -> dict[str, Any]:
        """Use the results of a step: hold its state, and check its metrics."""
        state, metrics = results
        self.held.advance(state)
        if self.diagnose is not None and (beginning := self.held.take_beginning()) is not None:
            with self.clock.part("device"):
                loss = float(metrics["loss"])  # waits for the first step
            if not math.isfinite(loss):
                raise self.diagnose(loss, beginning.values, microbatches)
        self.trained_on.after(metrics["loss"], self.held.step)
        with self.clock.part("device"):
            self.under_way.add(self.held.step, metrics)
        return metrics

    def profile_step(self, batch: Any, *, global_batch_size: int | None = None) -> StepProfile:
        """Run one real optimizer step and measure each task; the step trains exactly as `train_step` does.

        The state advances by one step, and state and metrics are the same as from `train_step`. The step waits for each
        task and each transfer, so it is slower than others; their times are then put together as they may overlap. The
        first run of a task is even slower, so measure a later step than the first. With several processes, all call
        this; each measures its own ranks, and all get the whole picture.

        Args:
          batch, global_batch_size: as in `train_step`.

        Returns:
          The metrics, the measured step and its simulation: `trainer.profile_step(batch).draw("step.svg")`.

        Raises:
          ValueError: without a pipeline; also the errors of `train_step`.
        """
        scheduling = self.scheduling
        if scheduling.mesh is None or scheduling.schedule is None:
            raise ValueError(no_pipeline("profile_step"))
        compiled, microbatches = self._prepare(batch, self.rows.whole(batch, global_batch_size))
        jax.block_until_ready(jax.tree.leaves(self.held.memory))  # steps under way would be measured with it
        results, timings = compiled.profile(self.held.memory, microbatches)
        metrics = self.finish(results, microbatches)
        return profile_of(metrics, timings, compiled.stages, scheduling.schedule, scheduling.num_microbatches)

    def end(self) -> None:
        """After the last step of a loop, wait until every process has trained the same steps, on the same batches."""
        await_same_end(self.scheduling.mesh, self.held.memory, self.held.step, self.trained_on)
