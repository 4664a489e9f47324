"""The trainer's steps: compiled, run one at a time, profiled, and described for a planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches, StackedMicrobatches
from jaxpp_flax.planning import PlanningStep, StepProfile
from jaxpp_flax.planning.profile import profile_of
from jaxpp_flax.trainers.data.batch import count_units, describe_batch, shape_of
from jaxpp_flax.trainers.data.batch_sharding import InferenceKind, compared_rows, examples_of_a_device
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.inference import InferenceCalls
from jaxpp_flax.trainers.loop.compiled_step import CompiledStep
from jaxpp_flax.trainers.mesh import describe_mesh
from jaxpp_flax.trainers.metrics.clock import timed
from jaxpp_flax.trainers.stages.stage_table import stage_table
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import one_of
from jaxpp_flax.trainers.step.facts.lost_bits import lost_bits
from jaxpp_flax.trainers.step.facts.worst_memory import worst_memory

__all__ = ["StepCalls"]


class StepCalls(InferenceCalls):
    """The methods of `PipelineTrainer` that compile and run single steps."""

    def step_function(self, batch: Any) -> Callable[[TrainState, Any], Any]:
        """Return the pure function that a step compiles: `(state, microbatches) -> (state, metrics)`.

        `microbatches` has leaves of shape (num_microbatches, microbatch, ...). The function also runs under plain
        `jax.jit`.
        """
        return self.steps.training_function(self.steps.rows.split(batch))

    @without_ambient_mesh
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """Compile the training step for batches like this one, and print the table of stages; nothing runs.

        The mesh may be of devices that are only described: `jaxpp_flax.planning.described_devices`.

        Args:
          batch: arrays, or their shapes (`jax.ShapeDtypeStruct`).
          global_batch_size: as in `fit`.

        Returns:
          The compiled step: see `jaxpp_flax.engine` (or JAX, for one stage on one device).

        Raises:
          ValueError, TypeError: if model, loss, batch, stages, schedule or devices do not fit.
        """
        whole = self.steps.rows.whole(batch, global_batch_size)
        self.steps.trained_on.shapes(whole, by_rows=whole is not batch)
        microbatches = self.steps.rows.split(whole)
        if self.steps.has_training(microbatches):
            return self._compiled_training(microbatches, whole)
        steps, display = self.steps, self.loop.display
        count = sum(leaf.size for leaf in jax.tree.leaves(self.held.memory.params))
        with display.phase(f"compiling {self.num_stages} stages, {count:,} parameters"):
            compiled = self._compiled_training(microbatches, whole)
        several = isinstance(microbatches, StackedMicrobatches)
        num_microbatches = len(microbatches.items) if several else self.num_microbatches
        for line in lost_bits(self.held.memory, self.precision.summed, num_microbatches):
            display.message_once(line)
        if self.mesh is not None:
            schedule, mesh = steps.scheduling.pipeline("the table of stages")
            title = f"{schedule.num_stages} stages on {describe_mesh(mesh)}, {schedule!r}"
            memory, worst = {of.rank: of.held_bytes for of in compiled.memory_analysis()}, None
            if several:
                memory, worst = worst_memory(microbatches, lambda mixed: self._compiled_training(mixed, whole))
            plan = self.plan
            table = stage_table(compiled.stages, memory, title, schedule, num_microbatches, plan)
            display.message(table)
            if worst is not None:
                shapes = describe_batch(Microbatches(tuple(map(one_of, worst.items))))
                display.message(
                    "memory: the most over this batch and over batches of one of its shapes alone; the worst has "
                    f"{num_microbatches} microbatches of {shapes}"
                )
            if plan is not None and steps.assigner.note_told(plan):
                display.message(plan.table())
        return compiled

    def compiled_step(self, batch: Any, *, global_batch_size: int | None = None) -> CompiledStep:
        """Return the training step as a pure function, for a loop that owns its state: `fit` runs the same program.

        Args:
          batch, global_batch_size: as in `compile`, which this calls.
        """
        self._check_ready("compiled_step")
        program = self.compile(batch, global_batch_size=global_batch_size)
        return CompiledStep(program, batch, self.steps.rows, global_batch_size)

    @without_ambient_mesh
    @timed("dispatch")
    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]:
        """Run one optimizer step on a batch. Batches with new shapes compile a new step first.

        Args:
          batch: leaves of shape (batch, ...); the whole batch, or this process's rows.
          global_batch_size: as in `fit`.

        Returns:
          Metrics of the whole batch, at least `loss`: values that behave like arrays (`float(metrics["loss"])`). The
          call does not wait for these values, but for the values of two steps before.

        Raises:
          BatchError: if the batch cannot be cut into microbatches, or lacks the rows that this process reads.
          NonFiniteLossError: if the first loss is not finite, or if the loss of two steps before is not finite; see
            `Training`.
          CheckpointSaveError: if a save in the background has failed since the last step.
          ValueError, TypeError: for other arguments that do not fit, before anything runs.
        """
        self._check_ready("train_step")
        compiled, microbatches = self._prepare(batch, global_batch_size)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            results = compiled(self.held.memory, microbatches)
        return self._finish(results)

    def _prepare(self, batch: Any, global_batch_size: int | None) -> tuple[Any, Any]:
        """Return the compiled step and its microbatches, once the processes' batches are compared."""
        rows, trained_on = self.steps.rows, self.steps.trained_on
        whole = rows.whole(batch, global_batch_size)
        trained_on.shapes(whole, by_rows=whole is not batch)
        microbatches, own = rows.split(whole), batch
        if isinstance(microbatches, StackedMicrobatches) and self.mesh is not None:
            order = self.steps.order_of(microbatches, lambda given: self._compiled_training(given, whole))
            microbatches, own = microbatches.in_order(order), StackedMicrobatches(batch.items).in_order(order)
        compiled = self._compiled_training(microbatches, whole)
        if self.checkpoints.store is not None:
            self.checkpoints.store.check()
        if whole is not batch:
            return compiled, compared_rows(compiled, own, microbatches, trained_on)
        trained_on.before(microbatches)
        return compiled, microbatches

    def _finish(self, results: Any) -> dict[str, Any]:
        """Use the results of a step: hold its state, and check its metrics."""
        state, metrics = results
        self.held.advance(state)
        self.steps.trained_on.after(metrics["loss"], self.step)
        with self.clock.part("device"):
            self.steps.under_way.add(self.step, metrics)
        return metrics

    def _compiled_training(self, microbatches: Any, whole: Any) -> Any:
        return self.steps.for_training(microbatches, lambda *counts: self._announce_shapes(whole, *counts))

    def _announce_shapes(self, whole: Any, known: int, new: int) -> None:
        """Tell that batches, or microbatches, of other shapes than `known` ones will be compiled; refuse too many."""
        most = self.training.max_batch_shapes
        if isinstance(whole, Microbatches) and self.mesh is not None:
            if known + new > most:
                raise BatchError(
                    f"microbatches of {new} other shape(s), after {known}: {describe_batch(whole)}. Each of the "
                    f"{self.num_stages} stages is compiled for each shape. Pad the microbatches to at most {most} "
                    "lengths, or allow more shapes: "
                    f"`training=Training(max_batch_shapes={max(2 * most, known + new)})`."
                )
            self.loop.display.message(
                f"compiling {self.num_stages} stages for {new} shape(s) of microbatches ({known + new} of at most "
                f"{most}): {describe_batch(whole)}"
            )
            return
        if known >= most:
            raise BatchError(
                f"a batch of another shape, after {known}: {describe_batch(whole)}. Each shape is compiled on its own. "
                f"Pad the batches to at most {known} lengths, or allow more shapes: "
                f"`training=Training(max_batch_shapes={2 * known})`."
            )
        if known:
            self.loop.display.message(
                f"compiling for another shape of batches ({known + 1} of at most {most}): {describe_batch(whole)}"
            )

    @without_ambient_mesh
    def profile_step(self, batch: Any, *, global_batch_size: int | None = None) -> StepProfile:
        """Run one real optimizer step and measure each task; the step trains exactly as `train_step` does.

        The state advances by one step, and state and metrics are the same as from `train_step`. The step waits for each
        task and each transfer, so it is slower than other steps; the measured times are then arranged with the overlap
        that the schedule allows. The first run of a task is even slower, so do not measure the first step. With several
        processes, all of them call this; each measures its own ranks, and all of them get the times of all ranks.

        Args:
          batch, global_batch_size: as in `train_step`.

        Returns:
          The metrics, the measured step and its simulation: `trainer.profile_step(batch).draw("step.svg")`.
          `jaxpp_flax.planning.plan` takes this profile as `costs=`.

        Raises:
          ValueError: without a pipeline; also the errors of `train_step`.
        """
        self._check_ready("profile_step")
        check_one_shape("profile_step", batch)
        schedule, mesh = self.steps.scheduling.pipeline("profile_step")
        compiled, microbatches = self._prepare(batch, global_batch_size)
        jax.block_until_ready(jax.tree.leaves(self.held.memory))  # steps under way would be measured with it
        results, timings = compiled.profile(self.held.memory, microbatches)
        metrics = self._finish(results)
        examples = examples_of_a_device(microbatches, mesh)
        return profile_of(metrics, timings, compiled.stages, schedule, self.num_microbatches, examples)

    def planning_step(self, batch: Any) -> PlanningStep:
        """Return a description of the training step for batches like this one, for `jaxpp_flax.planning.plan`.

        Raises:
          ValueError: without a pipeline.
        """
        check_one_shape("a plan", batch)
        return self.steps.to_plan(self.steps.rows.split(batch), count_units(batch)[0])

    def use_schedule(self, schedule: Any, num_stages: int | None = None) -> None:
        """Change to another schedule on the same ranks; the next step compiles it and moves arrays between ranks.

        Training continues with the same results: they do not depend on the schedule.

        Args:
          schedule: a name or a `Schedule`.
          num_stages: the number of stages; default: the current number (or the number of the `Schedule`).

        Raises:
          ValueError: if the schedule does not fit the ranks or the microbatches, the trainer has no ranks (one stage on
            one device), or its `Memory(residuals=)` is for another number of stages.
        """
        self._check_ready("use_schedule")
        self.steps.scheduling.use(schedule, num_stages)

    def leaves_read(self, batch: Any) -> Any:
        """Return, for each leaf of a batch of these shapes, True if this process reads the leaf in training.

        For any other leaf, a process may pass a `jax.ShapeDtypeStruct` with the whole batch's shape and dtype. Usually
        the first stage reads the inputs and the last stage reads the targets; then a process without these two stages
        loads nothing.
        """
        read = getattr(self.compile(batch), "read_here", None)
        if read is None:  # a step without a mesh
            return jax.tree.map(lambda _: True, batch)
        return jax.tree.unflatten(jax.tree.structure(batch), jax.tree.leaves(read[0][1]))

    def data_share(self) -> tuple[int, int]:
        """Return which share of the examples this process reads, as its number and the number of shares.

        A process that draws a share of its own, with `group_by_length(..., own_examples=True)` or by grain's
        `ShardOptions`, draws this one. Processes that hold the same places of the data axis, in several stages, have
        the same number.

        Raises:
          BatchError: if this process has no device of the mesh, or its devices are no neighbours on the data axis.

        Example:
          >>> import optax
          >>> from flax import nnx
          >>> from jaxpp_flax import PipelineTrainer
          >>> model, loss_fn = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), lambda model, x: model(x).sum()
          >>> trainer = PipelineTrainer(model, optax.sgd(0.1), loss_fn, num_stages=1, num_microbatches=1, logging=False)
          >>> number, shares = trainer.data_share()
          >>> texts = ["one", "two", "three"]
          >>> texts[number::shares]  # one process reads all of them
          ['one', 'two', 'three']
        """
        return self.steps.rows.share()

    def rows_read(self, batch: Any, call: Literal["train"] | InferenceKind = "train") -> Any:
        """Return the examples of a batch that this process reads: the rows to load of each leaf.

        With `fit(..., global_batch_size=)` or `train_step(..., global_batch_size=)`, the process passes only these
        rows, in this order, as an array of shape (rows, ...). They are the same as the index of the devices' shards in
        `jax.make_array_from_process_local_data`, in one microbatch after another. Processes may also divide a dataset
        by other means (such as grain's `ShardOptions`) and pass any examples in these places: each process adds its own
        examples to every microbatch.

        Args:
          batch: a whole batch, or its shapes: leaves with `shape` (B, ...) and `dtype`.
          call: the use of the batch. "evaluate" has the rows of "train" if the batch can be cut into `num_microbatches`
            parts, except for leaves that only one of the two losses reads.

        Returns:
          A tree like `batch`, of int64 arrays of shape (rows,): indices along the first axis, ascending; empty for a
          leaf that this process does not read. `...` for a scalar, which has no rows: pass the scalar itself.

        Raises:
          ValueError, TypeError: as `compile`; and for an unknown `call`.

        Example:
          >>> import jax, optax, numpy as np
          >>> from flax import nnx
          >>> from jaxpp_flax import PipelineStage, PipelineTrainer
          >>> model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(0))) for _ in range(2)])
          >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
          ...                           num_stages=2, num_microbatches=2, logging=False)
          >>> trainer.rows_read(jax.ShapeDtypeStruct((6, 4), np.float32))  # one process reads all of them
          array([0, 1, 2, 3, 4, 5])
        """
        rows = self.steps.rows
        if call not in ("train", *get_args(InferenceKind)):
            raise ValueError(f"rows_read knows no call {call!r}; use 'train', 'evaluate' or 'predict'.")
        check_one_shape("rows_read", batch)
        if call == "train":
            return rows.read(self.compile(batch), batch, rows.num_microbatches)
        part = rows.inference_parts(jax.tree.map(shape_of, batch), rows_only=True)[0]
        return rows.read(self._compiled(call, part), batch, part.num_microbatches)


def check_one_shape(what: str, batch: Any) -> None:
    """Refuse `Microbatches` where the microbatches of a step count as equal."""
    if isinstance(batch, Microbatches):
        raise BatchError(
            f"{what} is for batches of one shape, but this one is Microbatches. Pass a pytree of arrays: "
            "num_microbatches microbatches of one of the shapes."
        )
