"""`PipelineTrainer` trains an ordinary Flax model as a pipeline. The class makes its parts and calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from jaxpp_flax.assignment import Plan
from jaxpp_flax.assignment.resolution import AssignmentLike
from jaxpp_flax.checkpoint.format.paths import PathFilter
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.layers.remat import check_remat
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.assigner import Assigner
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.callbacks.states import CallbackStates
from jaxpp_flax.trainers.checkpoints import Checkpointing, Resume, open_store
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding, InferenceKind, ProcessInputs
from jaxpp_flax.trainers.data.position import ResumeData
from jaxpp_flax.trainers.data.remainder import Remainder
from jaxpp_flax.trainers.data.stream import DataTracking
from jaxpp_flax.trainers.described import described_by
from jaxpp_flax.trainers.loop.evaluation import Evaluation
from jaxpp_flax.trainers.loop.fit import FitArguments
from jaxpp_flax.trainers.loop.nonfinite import OnNonFinite, StepsUnderWay, choose_on_nonfinite
from jaxpp_flax.trainers.loop.process_synchronization import BatchComparison, await_same_call
from jaxpp_flax.trainers.loop.progress import Display
from jaxpp_flax.trainers.loop.saving import Saving
from jaxpp_flax.trainers.loop.stepping import Stepping
from jaxpp_flax.trainers.loop.training import Training
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_model
from jaxpp_flax.trainers.model.sharding import AxisRules, state_specs
from jaxpp_flax.trainers.options import (
    Assignment,
    Checkpoints,
    Inference,
    Logging,
    MeshOptions,
    Parameters,
    Precision,
    RandomStreams,
)
from jaxpp_flax.trainers.renamed_arguments import refuse_renamed
from jaxpp_flax.trainers.setup import check_count, check_functions, check_parameters, choose_model
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.state.weights import Weights
from jaxpp_flax.trainers.step.builder import StepBuilder, StepBuilderCache
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.step.diagnosis import first_loss_error
from jaxpp_flax.trainers.step.update import Update, choose_loss_scale
from jaxpp_flax.trainers.trackers import NoopTracker, Tracker
from jaxpp_flax.trainers.tuning.auto_schedule import AutoSchedule, ScheduleReport
from jaxpp_flax.trainers.tuning.scheduling import Scheduling
from jaxpp_flax.trainers.tuning.step_profile import StepProfile

__all__ = ["PipelineTrainer"]


class PipelineTrainer:
    """Trains a Flax model, NNX or Linen, as a pipeline of stages.

    The model is an ordinary model with marked layers (`PipelineStage`, `@pipeline_stage`). The trainer copies the model
    and does not change it. A batch is a pytree of arrays of shape (batch, ...), cut into `num_microbatches` equal
    parts. Scalars in the batch go to each part unchanged.

    `loss_fn(model, microbatch)` returns the mean loss; or `(loss_sum, weight)`; or either with a dict of metrics:
    `(loss, metrics)`. The step's loss and gradients are those of the whole batch (see `jaxpp_flax.trainers.step.loss`).
    For NNX, `model` is the module. For Linen, `model(x, ...)` is `module.apply` with the current variables and the
    keys of this microbatch, and `model.params`, `model.variables`, `model.rngs`, `model.training` are at hand.

    A function may have a parameter `training`: it is True in training. A function may have a parameter `rngs`: it gets
    the random numbers of its step and microbatch, an `nnx.Rngs` for NNX, a dict of keys for Linen. Both hold for
    `loss_fn`, `eval_loss_fn` and `predict_fn`.

    Args:
      model: an `nnx.Module`; or a Linen module, together with `variables=model.init(...)`.
      tx: an Optax optimizer. An optimizer whose update asks for `value` gets the loss of the whole batch.
      loss_fn: as above. The function is traced and never runs eagerly.
      num_stages: stages to cut the model into. One stage without a mesh runs under plain `jax.jit`.
      num_microbatches: parts of a batch.
      schedule: a name (`jaxpp_flax.schedules.names()`) or a `Schedule`; "auto" (or an `AutoSchedule`) measures the
        first steps and continues with the best schedule that a search finds.
      mesh: a `jax.sharding.Mesh` with an axis "stage", or an `MpmdMesh`. None: a mesh over `jax.devices()`. A mapping
        such as `{"data": 2}` adds axes to that mesh. `MeshOptions` has more: groups of devices, sharding rules.
      assignment: which blocks form a stage: "even", "balanced", sizes such as `[3, 2, 3]`, a mapping of names (globs)
        to stages, a `Plan` or its JSON file, or a policy. `Assignment` and `Balanced` add costs and a memory limit.
      variables: for a Linen model: all collections that `init` returned.
      parameters: `Parameters(wrt=, frozen=, ema_decay=)`: the parameters to train, and their moving average.
      remat: "full" recomputes the values between two marks in backward; a `jax.checkpoint` policy selects the values to
        keep. `PipelineStage(remat=)` sets it for one block.
      precision: `Precision(gradient_dtype=, loss_scale=, on_nonfinite=)`: number types, and losses that are not finite.
      inference: `Inference(eval_loss_fn=, predict_fn=)`, for `evaluate` and `predict`.
      seed: the seed of a Linen model's random numbers, and of `rngs` (the streams of an NNX model have their own
        seeds). `RandomStreams` names a Linen model's streams too.
      logging: `Logging(tracker=, every=, progress=)`: metrics and the progress display; False shows nothing.
      checkpoints: a directory, or `Checkpoints(directory, every=, keep=, ...)`; see `docs/checkpointing.md`.

    Raises:
      ModelError, MeshError, AssignmentError, ScheduleError, ValueError, TypeError: for arguments that do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage, PipelineTrainer
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layers = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=rngs)) for _ in range(2)])
      ...     def __call__(self, x):
      ...         for layer in self.layers:
      ...             x = jnp.tanh(layer(x))
      ...         return x
      >>> def loss_fn(model, batch):
      ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
      >>> trainer = PipelineTrainer(MLP(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=4,
      ...                           logging=False)
      >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.zeros((8, 4))}
      >>> before = float(trainer.train_step(batch)["loss"])
      >>> trainer.fit([batch], steps=3)["loss"] < before
      True
      >>> trainer.model(batch["x"]).shape  # an ordinary module with the current weights
      (8, 4)
    """

    @refuse_renamed
    def __init__(
        self,
        model: nnx.Module | nn.Module,
        tx: optax.GradientTransformation,
        loss_fn: Callable[..., Any],
        *,
        num_stages: int,
        num_microbatches: int,
        schedule: str | Schedule | AutoSchedule = "1f1b",
        mesh: Mesh | MpmdMesh | Mapping[str, int] | MeshOptions | None = None,
        assignment: AssignmentLike | Assignment = "even",
        variables: Mapping[str, Any] | None = None,
        parameters: Parameters | None = None,
        remat: Literal["full"] | Callable[..., bool] | None = None,
        precision: Precision | None = None,
        inference: Inference | None = None,
        seed: int | RandomStreams = 0,
        logging: Logging | bool = True,
        checkpoints: str | os.PathLike[str] | Checkpoints | None = None,
    ) -> None:
        num_stages = check_count("num_stages", num_stages)
        num_microbatches = check_count("num_microbatches", num_microbatches)
        check_functions(loss_fn=loss_fn)
        check_remat(remat, "PipelineTrainer")
        devices, assigned, streams = MeshOptions.of(mesh), Assignment.of(assignment), RandomStreams.of(seed)
        trained, numbers = Parameters.of(parameters), Precision.of(precision)
        on_nonfinite = choose_on_nonfinite(numbers.on_nonfinite, numbers.loss_scale)
        update = Update(
            tx=tx, loss_scale=choose_loss_scale(numbers.loss_scale), gradient_dtype=numbers.gradient_dtype,
            ema_decay=trained.ema_decay, skips_nonfinite=on_nonfinite == "skip",
        )  # fmt: skip
        adapter, params, rest, notes = choose_model(
            model, variables, trained.wrt, trained.frozen, streams.seed, streams.names
        )
        check_parameters(params, model)
        self._assigner = Assigner(assigned.how, assigned.cost, assigned.memory_limit)
        self._scheduling = Scheduling(
            num_microbatches, schedule, num_stages, devices.num_ranks, devices.mesh, devices.axes
        )
        self._held = StateHolder(update.first_state(params, rest), update.tx.init)
        rules = AxisRules.of(devices.sharding_rules)
        specs = state_specs(self._held.memory, notes, self.mesh, rules)
        self._builders = StepBuilderCache(
            StepBuilder(model=adapter, update=update, loss_fn=loss_fn, remat=remat), num_microbatches
        )
        self._executables = CompiledSteps(
            self._scheduling, self._assigner, self._builders, self._held, state_specs=specs, rules=rules
        )
        self._rows = BatchSharding(self.mesh, num_microbatches, self._scheduling.batch_shards)
        self._make_loop(
            adapter, update, loss_fn, on_nonfinite, type(model).__name__,
            inference=Inference.of(inference), logging=Logging.of(logging), checkpoints=Checkpoints.of(checkpoints),
        )  # fmt: skip

    def _make_loop(
        self,
        adapter: ModelAdapter,
        update: Update,
        loss_fn: Callable[..., Any],
        on_nonfinite: OnNonFinite,
        model_name: str,
        *,
        inference: Inference,
        logging: Logging,
        checkpoints: Checkpoints | None,
    ) -> None:
        """Make the parts that run steps. No part refers to the trainer, so deleting the trainer frees its memory."""
        held, builders, mesh, rows = self._held, self._builders, self.mesh, self._rows

        def meet(call: str) -> None:
            await_same_call(mesh, held.memory, call)

        def diagnose(loss: float, beginning: tuple[Any, Any] | None, microbatches: Any) -> Exception:
            return first_loss_error(loss, beginning, adapter, loss_fn, microbatches, rows.num_microbatches, mesh)

        self._weights = Weights(adapter, held, meet)
        self._display = Display(logging.progress)
        sends = jax.process_index() == 0  # one process sends for all
        self.tracker: Tracker = logging.tracker if sends and logging.tracker is not None else NoopTracker()
        self.stopping: str | None = None
        self._evaluation = Evaluation(
            self._scheduling, rows, builders, self._executables, held,
            eval_loss_fn=inference.eval_loss_fn or loss_fn, predict_fn=inference.predict_fn or call_model, meet=meet,
        )  # fmt: skip
        under_way = StepsUnderWay(on_nonfinite, tells=update.loss_scale is None)
        trained_on = BatchComparison(mesh, "training")
        tracking, callback_states = DataTracking(held), CallbackStates()
        self._checkpoints = Checkpointing(
            open_store(checkpoints),
            held=held, tracking=tracking, callbacks=callback_states, under_way=under_way, trained_on=trained_on,
            display=self._display, init=update.tx.init, model_name=model_name,
            saves_nonfinite=on_nonfinite == "ignore", is_across=rows.is_across, meet=meet,
        )  # fmt: skip
        saving = Saving(
            self._checkpoints, held=held, under_way=under_way, display=self._display,
            by_itself=checkpoints is not None and checkpoints.every is not None,
            is_across=rows.is_across, meet=meet,
        )  # fmt: skip

        self._stepping = Stepping(
            self._scheduling, self._assigner, rows, self._executables, held,
            under_way=under_way, trained_on=trained_on, display=self._display, check_saves=saving.check,
            diagnose=None if on_nonfinite == "ignore" else diagnose,
        )  # fmt: skip
        self._training = Training(
            rows, checkpoints=self._checkpoints, saving=saving, tracking=tracking, callbacks=callback_states,
            display=self._display, log_every=logging.every,
            deadline=None if checkpoints is None else checkpoints.preemption_deadline,
            trace=lambda microbatches: builders.trace(held.memory, microbatches),
            await_same_end=self._stepping.end,
        )  # fmt: skip
        self._inputs = ProcessInputs(rows, self._stepping.compile, self._evaluation.compiled)

    # ------------------------------------------------------------------ the trainer's attributes

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self._held.step

    @property
    def num_microbatches(self) -> int:
        """The number of parts of a batch."""
        return self._scheduling.num_microbatches

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self._scheduling.num_stages

    @property
    def schedule(self) -> Schedule | None:
        """The schedule; None if one stage runs under plain `jax.jit`."""
        return self._scheduling.schedule

    @property
    def mesh(self) -> MpmdMesh | None:
        """The mesh of the ranks; None if one stage runs under plain `jax.jit`."""
        return self._scheduling.mesh

    @property
    def plan(self) -> Plan | None:
        """The assignment of blocks to stages; None before the training step is compiled, and without a pipeline."""
        return self._assigner.plan_of(self.schedule, self.num_microbatches)

    @property
    def schedule_report(self) -> ScheduleReport | None:
        """The result of the search of `schedule="auto"`, predicted and measured; None before the search."""
        return self._scheduling.report

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state, the rest of the model's state, and the step, without a copy.

        The next `train_step` reuses the memory of these arrays. To keep weights, use `trainer.model`.
        """
        return self._held.whole()

    @property
    def model(self) -> Any:
        """An ordinary module with the current weights (NNX: a new module; Linen: a module bound to its variables).

        With several processes, each process must read `model` after the same step.
        """
        return self._weights.model()

    @property
    def ema_model(self) -> Any:
        """An ordinary module with the moving average of the weights instead of the trained weights.

        Raises:
          ValueError: without `Parameters(ema_decay=)`.
        """
        return self._weights.ema_model()

    @property
    def variables(self) -> dict[str, Any]:
        """The current variables of a Linen model, in the form that `module.apply` takes.

        Raises:
          TypeError: for an NNX model.
        """
        return self._weights.variables()

    # ------------------------------------------------------------------ training

    def step_function(self, batch: Any) -> Callable[[TrainState, Any], Any]:
        """Return the pure function that a step compiles: `(state, microbatches) -> (state, metrics)`.

        `microbatches` has leaves of shape (num_microbatches, microbatch, ...). The function also runs under plain
        `jax.jit`.
        """
        return self._executables.training_function(self._rows.split(batch))

    @described_by(Stepping.compile)
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        return self._stepping.compile(batch, global_batch_size=global_batch_size)

    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]:
        """Run one optimizer step on a batch. Batches with new shapes compile a new step first.

        Args:
          batch: leaves of shape (batch, ...).
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
        whole = self._rows.whole(batch, global_batch_size)
        tuner = self._scheduling.tuner
        if tuner is not None and not tuner.done:
            return tuner.step(self, whole)
        return self._stepping.step(batch, whole)

    @described_by(Training.steps)
    def training_steps(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder | None = None,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        return self._training.steps(
            self, data, steps=steps, epochs=epochs, global_batch_size=global_batch_size, remainder=remainder
        )

    def fit(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder | None = None,
        eval_data: Iterable[Any] | None = None,
        eval_every: int | None = None,
        eval_global_batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        resume_data: ResumeData = "fast_forward",
    ) -> dict[str, Any]:
        """Train on `data`.

        Args:
          data: an iterable of batches: a list, a generator, a grain dataset or loader.
          steps: the number of steps to train. Data that can be iterated again is repeated as needed.
          epochs: the number of passes over the data, which must allow a new iteration. Without steps and epochs: one.
          global_batch_size: None: each process passes the whole batches (leaves that it does not read may be shapes). A
            number: the number of examples in a batch; each process passes only the examples that it reads, `rows_read`.
          remainder: the rule for a batch with fewer examples than the first one, such as the last one of a pass. "drop"
            leaves out a batch that cannot be cut into microbatches. "pad" repeats the last example, and the loss
            ignores these copies by `batch["mask"]` (see `docs/trainer.md`). "error" refuses the batch. None: an error
            before the first step if data is a list, else "drop", with a message.
          eval_data: data to evaluate at the end, and every `eval_every` steps.
          eval_global_batch_size: as `global_batch_size`, for `eval_data`: see `evaluate`.
          callbacks: see `jaxpp_flax.trainers.callbacks`.
          resume: True continues from the latest checkpoint, or from the state in memory if there is no checkpoint;
            `steps` and `epochs` count from the beginning. "latest_valid" sets damaged checkpoints aside and takes the
            newest whole one.
          resume_data: how to find the position in data without `set_state`: "fast_forward" draws the used batches and
            drops them, "refuse" raises, "restart" begins the data again.

        Returns:
          The last metrics, as floats; the metrics of the last evaluation as `eval_loss`, ...

        Raises:
          ValueError, TypeError: for arguments that do not fit, before the first step.
          NonFiniteLossError: see `train_step`.
          CorruptCheckpointError: if the latest checkpoint is damaged, unless `resume="latest_valid"`.
        """
        arguments = FitArguments(
            steps=steps,
            epochs=epochs,
            global_batch_size=global_batch_size,
            remainder=remainder,
            eval_data=eval_data,
            eval_every=eval_every,
            eval_global_batch_size=eval_global_batch_size,
            callbacks=callbacks,
            resume=resume,
            resume_data=resume_data,
        )
        return self._training.fit(self, data, arguments)

    def stop(self, reason: str) -> None:
        """End `fit` after the current step; callbacks call it."""
        self.stopping = reason

    def message(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        self._display.message(text)

    # ------------------------------------------------------------------ inference, data, schedules, checkpoints

    @described_by(Evaluation.evaluate)
    def evaluate(self, data: Iterable[Any], *, global_batch_size: int | None = None) -> dict[str, Any]:
        return self._evaluation.evaluate(data, global_batch_size=global_batch_size)

    @described_by(Evaluation.predict)
    def predict(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        return self._evaluation.predict(batch, global_batch_size=global_batch_size)

    @described_by(ProcessInputs.leaves_read)
    def leaves_read(self, batch: Any) -> Any:
        return self._inputs.leaves_read(batch)

    @described_by(ProcessInputs.rows_read)
    def rows_read(self, batch: Any, call: Literal["train"] | InferenceKind = "train") -> Any:
        return self._inputs.rows_read(batch, call)

    @described_by(Scheduling.use)
    def use_schedule(self, schedule: Any, num_stages: int | None = None) -> None:
        self._scheduling.use(schedule, num_stages)

    @described_by(Stepping.profile_step)
    def profile_step(self, batch: Any) -> StepProfile:
        return self._stepping.profile_step(batch)

    @described_by(Checkpointing.save)
    def save(self, where: str | os.PathLike[str] | int | None = None, *, wait: bool = True) -> Path:
        return self._checkpoints.save(where, wait=wait)

    @described_by(Checkpointing.restore)
    def restore(
        self,
        where: str | os.PathLike[str] | int = "latest",
        *,
        only: PathFilter | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Literal["error", "keep"] = "error",
        low_memory: bool = False,
    ) -> None:
        self._checkpoints.restore(where, only=only, rename=rename, missing=missing, low_memory=low_memory)
