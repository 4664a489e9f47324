"""The six objects of a trainer, and how they are made from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.memory_kinds import check_devices
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.planning import Plan
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.callbacks.base import CallbackStates
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.stream import TrainingData
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.loop.training_loop import TrainingLoop
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.metrics.measured_step import MeasuredStep
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics
from jaxpp_flax.trainers.model.calling import check_functions
from jaxpp_flax.trainers.model.chosen_model import ChosenModel, check_memory, check_parameters, choose_model
from jaxpp_flax.trainers.model.sharding import AxisRules, state_specs
from jaxpp_flax.trainers.options import Checkpoints, Inference, Logging, Precision, Training
from jaxpp_flax.trainers.options.planned import Planned
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.stages.assigner import Assigner
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import weights_of
from jaxpp_flax.trainers.state.optimizer_memory import OptimizerMemory
from jaxpp_flax.trainers.state.placement import Ranks
from jaxpp_flax.trainers.state.train_state import shapes_of
from jaxpp_flax.trainers.step.accumulation import Pending
from jaxpp_flax.trainers.step.builder import StepBuilder
from jaxpp_flax.trainers.step.builder_cache import StepBuilderCache
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.step.learning_rate import NO_LEARNING_RATE
from jaxpp_flax.trainers.step.microbatch_orders import MicrobatchOrders
from jaxpp_flax.trainers.step.nonfinite import StepsUnderWay
from jaxpp_flax.trainers.step.optimizer_update import Update

__all__ = ["TrainerObjects"]

_CHANGE_THE_STATE = (
    "compiled_step", "fit", "load_pretrained", "profile_step", "restore", "set_state", "set_weights", "train_step",
    "training_steps", "use_schedule",
)  # fmt: skip


class TrainerObjects:
    """The six objects of a trainer: `model`, `steps`, `held`, `data`, `checkpoints` and `loop`.

    Each public method of a trainer stands in one class that derives from this one, a class for a chapter. No object
    refers to the trainer, so deleting the trainer frees its memory.

    Raises:
      ModelError, AssignmentError, MeshError, ScheduleError, TypeError, ValueError: for arguments that do not fit.
    """

    model: ChosenModel
    """The model as pure functions, and its name; of its values only the shapes."""
    steps: CompiledSteps
    """The schedule, the stages, the steps that are compiled for them, and the rows of a batch that a process reads."""
    held: StateHolder
    """The state: a shape with a source, or an array at its place, for each leaf."""
    data: TrainingData
    """The position of the run in its data."""
    checkpoints: Checkpointing
    """The directory of checkpoints, and what a checkpoint holds."""
    loop: TrainingLoop
    """The loop over data."""
    pending: Pending | None = None
    """The gradients that `accumulate` has summed for a step that is not taken yet."""
    measures: RunMetrics
    """The time, the units and the operations of the run, for `LogMetrics`."""

    @without_ambient_mesh
    def __init__(
        self,
        model: Any,
        tx: Any,
        loss_fn: Callable[..., Any],
        *,
        chosen: Planned,
        variables: Mapping[str, Any] | Callable[..., Any] | None,
        training: Training,
        precision: Precision,
        inference: Inference,
        logging: Logging,
        checkpoints: Checkpoints | None,
    ) -> None:
        scheduling = _scheduling(chosen)
        on_nonfinite = training.rule(scaled=precision.scale is not None)
        _check_options(loss_fn, chosen, scheduling)
        self.training, self.precision, self.inference = training, precision, inference
        kept = OptimizerMemory(chosen.memory.optimizer_state)
        update = Update(
            tx=tx, loss_scale=precision.scale, gradient_dtype=precision.summed, ema_decay=training.ema_decay,
            skips_nonfinite=on_nonfinite == "skip", kept=kept,
        )  # fmt: skip
        taken = choose_model(model, variables, training.wrt, training.frozen, training.seed)
        check_parameters(taken.params, taken.name, precision.stored)
        check_memory(taken.params, taken.rest, taken.name)
        assigner = Assigner(chosen.assignment)
        first = update.first_state(taken.params, taken.rest)
        update = replace(update, measured=logging.step_metrics(first.opt_state))
        self.model = replace(
            taken, adapter=taken.adapter.computing_in(precision.computed), params=shapes_of(taken.params),
            rest=shapes_of(taken.rest), initializer=None,
        )  # fmt: skip
        rules = AxisRules.in_context(chosen.mesh.rules)
        specs, ignored = state_specs(first, taken.notes, scheduling.mesh, rules)
        ranks = None if scheduling.mesh is None else Ranks(mesh=scheduling.mesh, specs=specs, kept=kept)
        self.held = StateHolder(first, update.tx.init, initializer=taken.initializer, ranks=ranks, kept=kept)
        if (function := inference.params) is not None:  # refuse a wrong one now
            jax.eval_shape(lambda state: weights_of(state, function), self.held.memory)
        builder = StepBuilder(
            model=self.model.adapter, update=update, loss_fn=loss_fn, remat=chosen.memory.remat,
            after_update=training.after_update,
        )  # fmt: skip
        stage = StageContext(mesh=scheduling.mesh, specs=specs, rules=rules)
        builders = StepBuilderCache(builder, scheduling.num_microbatches, stage)
        display = Display(messages=logging.messages, progress=logging.progress)
        if logging.lacks_learning_rate(update.measured):
            display.message(NO_LEARNING_RATE)
        under_way = StepsUnderWay(on_nonfinite, display, tells=update.loss_scale is None)
        rows = BatchSharding(scheduling.mesh, scheduling.num_microbatches)
        self.measures = _measures(logging, rows, self.held, builders)
        self.measures.skipped = lambda: under_way.skipped
        self.steps = CompiledSteps(
            scheduling, assigner, builders, self.held, rows,
            stage=stage, ignored=ignored, fsdp=chosen.mesh.fsdp, clock=self.clock, under_way=under_way,
            orders=MicrobatchOrders(training.order, display.message),
        )  # fmt: skip
        self._make_loop(display, checkpoints, saves_nonfinite=on_nonfinite == "ignore")

    def _make_loop(self, display: Display, options: Checkpoints | None, *, saves_nonfinite: bool) -> None:
        """Make what goes over data and saves."""
        held, callbacks = self.held, CallbackStates()
        self.data = TrainingData(lambda: held.step, display)
        store = None if options is None else CheckpointStore(
            options.directory, every=options.every, keep=options.keep, best=options.ranking,
            asynchronous=options.asynchronous,
        )  # fmt: skip
        self.checkpoints = Checkpointing(
            store=store, held=held, model=self.model, data=self.data, callbacks=callbacks, measured=MeasuredStep(),
            under_way=self.steps.under_way, trained_on=self.steps.trained_on, display=display,
            saves_nonfinite=saves_nonfinite, clock=self.clock,
        )  # fmt: skip
        self.loop = TrainingLoop(
            held=held, checkpoints=self.checkpoints, data=self.data, callbacks=callbacks, display=display,
            saves=options is not None and options.every is not None,
            deadline=None if options is None else options.preemption_deadline,
            memory_every=None if options is None else options.memory_every,
        )  # fmt: skip

    # ------------------------------------------------------------------ attributes

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self.held.step

    @property
    def num_microbatches(self) -> int:
        """The number of parts of a batch."""
        return self.steps.scheduling.num_microbatches

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self.steps.scheduling.num_stages

    @property
    def schedule(self) -> Schedule | None:
        """The schedule; None if one stage on one device runs under plain `jax.jit`."""
        return self.steps.scheduling.schedule

    @property
    def mesh(self) -> MpmdMesh | None:
        """The mesh of the ranks; None if one stage on one device runs under plain `jax.jit`."""
        return self.steps.scheduling.mesh

    @property
    def plan(self) -> Plan | None:
        """The plan of this training; None before the training step is compiled, and without a pipeline."""
        return self.steps.assigner.plan_of(self.schedule, self.num_microbatches)

    @property
    def clock(self) -> Clock:
        """The clock of the run, for the metrics."""
        return self.measures.clock

    def message(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        self.loop.display.message(text)

    def _check_ready(self, call: str) -> None:
        """Refuse a call that needs values on devices, if there are none.

        Raises:
          RuntimeError: on a mesh of a described topology, for which a trainer only compiles; or if the state is gone;
            or if the call would change the state under the gradients of `accumulate`.
        """
        if self.pending is not None and call in _CHANGE_THE_STATE:
            raise RuntimeError(
                f"trainer.{call} would change the state, but trainer.accumulate has summed {self.pending} for a step "
                "that is not taken. Call trainer.update() to take it, or trainer.zero_grad() to drop them."
            )
        if call not in ("compiled_step", "fit", "restore", "set_state"):  # `fit` may resume
            self.held.check_owned(f"trainer.{call}")
        if self.mesh is not None:
            self.mesh.check_attached(f"trainer.{call}")


def _scheduling(chosen: Planned) -> Scheduling:
    """Make the schedule and the mesh; refuse counts that are no whole numbers."""
    return Scheduling(
        check_count("num_microbatches", chosen.num_microbatches),
        chosen.schedule,
        check_count("num_stages", chosen.num_stages),
        chosen.mesh.num_ranks,
        chosen.mesh.mesh,
        chosen.mesh.axes,
        chosen.memory.residuals,
    )


def _check_options(loss_fn: Any, chosen: Planned, scheduling: Scheduling) -> None:
    """Refuse a loss of another form, and options that the devices, the mesh or one another do not allow."""
    check_functions(loss_fn=loss_fn)
    mesh = scheduling.mesh
    used = jax.local_devices()[:1] if mesh is None else mesh.jax_mesh.devices.flat
    check_devices(chosen.memory.optimizer_state, used, "Memory(optimizer_state=)")
    if chosen.memory.residuals is not None:
        scheduling.pipeline("Memory(residuals=)")
    if mesh is None and chosen.mesh.fsdp != "microbatch":
        raise MeshError(
            f"MeshOptions(fsdp={chosen.mesh.fsdp!r}) gathers parameters that are sharded inside a stage, but one stage "
            "on one device runs under plain jax.jit. Leave fsdp= out, or give axes={'fsdp': ...}."
        )


def _measures(logging: Logging, rows: BatchSharding, held: StateHolder, builders: StepBuilderCache) -> RunMetrics:
    devices = jax.devices()[:1] if rows.mesh is None else list(rows.mesh.jax_mesh.devices.flat)

    def flops(batch: Any, global_batch_size: int | None) -> float:
        size = None if isinstance(batch, Microbatches) else global_batch_size  # theirs follows from the rows here
        return builders.count_flops(held.memory, rows.split(rows.whole(batch, size)))

    return logging.run_metrics(devices, flops)
