"""The parts of a trainer, made from its options: the core compiles steps and holds the state, the others run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.memory_kinds import check_devices
from jaxpp_flax.trainers.callbacks.base import CallbackStates
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.stream import TrainingData
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.generation.generator import Generator
from jaxpp_flax.trainers.inference import Evaluation
from jaxpp_flax.trainers.loop.train_step import TrainStep
from jaxpp_flax.trainers.loop.training_loop import TrainingLoop
from jaxpp_flax.trainers.metrics.measured_step import MeasuredStep
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_model, check_functions
from jaxpp_flax.trainers.model.chosen_model import check_memory, check_parameters, choose_model
from jaxpp_flax.trainers.model.sharding import AxisRules, state_specs
from jaxpp_flax.trainers.options import (
    Checkpoints,
    Inference,
    Logging,
    Memory,
    MeshOptions,
    Precision,
    Training,
)
from jaxpp_flax.trainers.options.planned import Planned
from jaxpp_flax.trainers.pretrained import PretrainedWeights
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.stages.assigner import Assigner
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights
from jaxpp_flax.trainers.state.optimizer_memory import OptimizerMemory
from jaxpp_flax.trainers.state.placement import Ranks
from jaxpp_flax.trainers.step.builder import StepBuilder
from jaxpp_flax.trainers.step.builder_cache import StepBuilderCache
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.step.learning_rate import NO_LEARNING_RATE
from jaxpp_flax.trainers.step.nonfinite import OnNonFinite, StepsUnderWay
from jaxpp_flax.trainers.step.optimizer_update import Update
from jaxpp_flax.trainers.weights import Weights

__all__ = ["Core", "Parts", "make_core", "make_parts", "make_scheduling"]


@dataclass(frozen=True, kw_only=True)
class Core:
    """The parts that make and compile steps, and the state."""

    adapter: ModelAdapter
    model_name: str
    update: Update
    loss_fn: Callable[..., Any]
    training: Training
    precision: Precision
    on_nonfinite: OnNonFinite
    max_batch_shapes: int
    scheduling: Scheduling
    assigner: Assigner
    held: StateHolder
    builders: StepBuilderCache
    executables: CompiledSteps
    rows: BatchSharding
    measures: RunMetrics


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that run steps. No part refers to the trainer, so deleting the trainer frees its memory."""

    weights: Weights
    pretrained: PretrainedWeights
    display: Display
    evaluation: Evaluation
    generator: Generator
    checkpoints: Checkpointing
    train_step: TrainStep
    loop: TrainingLoop


def make_scheduling(chosen: Planned) -> Scheduling:
    """Make the schedule and the mesh from the arguments of a trainer; refuse counts that are no whole numbers."""
    return Scheduling(
        check_count("num_microbatches", chosen.num_microbatches),
        chosen.schedule,
        check_count("num_stages", chosen.num_stages),
        chosen.mesh.num_ranks,
        chosen.mesh.mesh,
        chosen.mesh.axes,
        chosen.memory.residuals,
    )


@without_ambient_mesh
def make_core(
    model: Any,
    tx: Any,
    loss_fn: Callable[..., Any],
    *,
    scheduling: Scheduling,
    devices: MeshOptions,
    assignment: Any,
    variables: Mapping[str, Any] | Callable[..., Any] | None,
    training: Training,
    precision: Precision,
    memory: Memory,
    logging: Logging,
) -> Core:
    """Make the core from the checked options of a trainer.

    Raises:
      ModelError, AssignmentError, TypeError, ValueError: for a model, optimizer or assignment that does not fit.
    """
    on_nonfinite, kept = training.rule(scaled=precision.scale is not None), OptimizerMemory(memory.optimizer_state)
    _check_options(loss_fn, memory, scheduling, devices)
    update = Update(
        tx=tx, loss_scale=precision.scale, gradient_dtype=precision.summed, ema_decay=training.ema_decay,
        skips_nonfinite=on_nonfinite == "skip", kept=kept,
    )  # fmt: skip
    chosen = choose_model(model, variables, training.wrt, training.frozen, training.seed)
    check_parameters(chosen.params, chosen.name, precision.stored)
    check_memory(chosen.params, chosen.rest, chosen.name)
    assigner = Assigner(assignment)
    first = update.first_state(chosen.params, chosen.rest)
    update = replace(update, measured=logging.step_metrics(first.opt_state))
    mesh, rules = scheduling.mesh, AxisRules.in_context(devices.rules)
    specs, ignored = state_specs(first, chosen.notes, mesh, rules)
    ranks = None if mesh is None else Ranks(mesh=mesh, specs=specs, kept=kept)
    held = StateHolder(first, update.tx.init, initializer=chosen.initializer, ranks=ranks, kept=kept)
    adapter = chosen.adapter.computing_in(precision.computed)
    builder = StepBuilder(
        model=adapter, update=update, loss_fn=loss_fn, remat=memory.remat, after_update=training.after_update
    )
    stage = StageContext(mesh=mesh, specs=specs, rules=rules)
    builders = StepBuilderCache(builder, scheduling.num_microbatches, stage, training.unused)
    rows = BatchSharding(mesh, scheduling.num_microbatches)
    measures = _run_metrics(logging, held, builders, rows)
    executables = CompiledSteps(
        scheduling, assigner, builders, held,
        stage=stage, ignored=ignored, fsdp=devices.fsdp, clock=measures.clock,
    )  # fmt: skip
    return Core(
        adapter=adapter,
        model_name=chosen.name,
        update=update,
        loss_fn=loss_fn,
        training=training,
        precision=precision,
        on_nonfinite=on_nonfinite,
        max_batch_shapes=training.max_batch_shapes,
        scheduling=scheduling,
        assigner=assigner,
        held=held,
        builders=builders,
        executables=executables,
        rows=rows,
        measures=measures,
    )


def _run_metrics(logging: Logging, held: StateHolder, builders: StepBuilderCache, rows: BatchSharding) -> RunMetrics:
    devices = jax.devices()[:1] if rows.mesh is None else list(rows.mesh.jax_mesh.devices.flat)

    def flops(batch: Any, global_batch_size: int | None) -> float:
        return builders.count_flops(held.memory, rows.split(rows.whole(batch, global_batch_size)))

    return logging.run_metrics(devices, flops)


def _check_options(
    loss_fn: Any,
    memory: Memory,
    scheduling: Scheduling,
    devices: MeshOptions,
) -> None:
    """Refuse a loss of another form, and options that the devices, the mesh or one another do not allow."""
    check_functions(loss_fn=loss_fn)
    mesh = scheduling.mesh
    used = jax.local_devices()[:1] if mesh is None else mesh.jax_mesh.devices.flat
    check_devices(memory.optimizer_state, used, "Memory(optimizer_state=)")
    if memory.residuals is not None:
        scheduling.pipeline("Memory(residuals=)")
    if mesh is None and devices.fsdp != "microbatch":
        raise MeshError(
            f"MeshOptions(fsdp={devices.fsdp!r}) gathers parameters that are sharded inside a stage, but one stage "
            "on one device runs under plain jax.jit. Leave fsdp= out, or give axes={'fsdp': ...}."
        )


@without_ambient_mesh
def make_parts(core: Core, inference: Inference, logging: Logging, options: Checkpoints | None) -> Parts:
    """Make the parts that run the steps of `core`; `options` are those of checkpoints."""
    held, rows, mesh = core.held, core.rows, core.scheduling.mesh
    display, callbacks = Display(logging.progress), CallbackStates()
    data = TrainingData(lambda: held.step, display)
    if logging.lacks_learning_rate(core.update.measured):
        display.message(NO_LEARNING_RATE)
    under_way = StepsUnderWay(core.on_nonfinite, display, tells=core.update.loss_scale is None)
    core.measures.skipped = lambda: under_way.skipped
    trained_on, clock = BatchComparison(mesh, "training"), core.measures.clock
    store = None if options is None else CheckpointStore(
        options.directory, every=options.every, keep=options.keep, best=options.ranking,
        asynchronous=options.asynchronous,
    )  # fmt: skip
    checkpoints = Checkpointing(
        store=store, held=held, data=data, callbacks=callbacks, under_way=under_way,
        trained_on=trained_on, display=display, model_name=core.model_name, frozen_in=core.adapter.frozen_in,
        measured=MeasuredStep(), saves_nonfinite=core.on_nonfinite == "ignore",
        clock=clock,
    )  # fmt: skip
    train_step = TrainStep(
        scheduling=core.scheduling, assigner=core.assigner, rows=rows, executables=core.executables, held=held,
        under_way=under_way, trained_on=trained_on, display=display,
        check_saves=(lambda: None) if store is None else store.check, clock=clock,
        max_batch_shapes=core.max_batch_shapes,
    )  # fmt: skip
    inference_weights = InferenceWeights(held, inference.params, display.message)
    evaluation = Evaluation(
        scheduling=core.scheduling, rows=rows, builders=core.builders, executables=core.executables,
        weights=inference_weights, eval_loss_fn=inference.eval_loss_fn or core.loss_fn,
        predict_fn=inference.predict_fn or call_model, clock=clock,
    )  # fmt: skip
    loop = TrainingLoop(
        held=held, checkpoints=checkpoints, data=data, callbacks=callbacks, display=display,
        saves=options is not None and options.every is not None,
        deadline=None if options is None else options.preemption_deadline,
    )  # fmt: skip
    weights = Weights(core.adapter, held, inference_weights, mesh)
    return Parts(
        weights=weights,
        pretrained=PretrainedWeights(held, inference_weights, mesh, weights.abstract_model),
        display=display,
        evaluation=evaluation,
        generator=Generator(core.adapter, core.scheduling, core.executables, held, inference_weights),
        checkpoints=checkpoints,
        train_step=train_step,
        loop=loop,
    )
