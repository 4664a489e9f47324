"""`PipelineTrainer`: an ordinary Flax model, trained as a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from jaxpp_flax.assignment.resolution import AssignmentLike
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.layers.remat import check_remat
from jaxpp_flax.processes import process_group
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.assigner import Assigner
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.checkpoints import Checkpointed, Resume, check_resume
from jaxpp_flax.trainers.data.batch import signature, split_batch
from jaxpp_flax.trainers.data.loading import rows_alike
from jaxpp_flax.trainers.data.position import ResumeData
from jaxpp_flax.trainers.data.remainder import Remainder, RemainderRule, check_mask, check_masked
from jaxpp_flax.trainers.data.stream import batches
from jaxpp_flax.trainers.loop.evaluation import Inferring
from jaxpp_flax.trainers.loop.fit import run_fit
from jaxpp_flax.trainers.loop.nonfinite import StepsUnderWay, choose_on_nonfinite
from jaxpp_flax.trainers.loop.process_synchronization import BatchComparison, await_same_call, compare_compilations
from jaxpp_flax.trainers.loop.progress import choose_meter
from jaxpp_flax.trainers.mesh import num_batch_shards
from jaxpp_flax.trainers.model.adapter import parameter_count
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
from jaxpp_flax.trainers.state.holder import HeldState
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.state.weights import Weights
from jaxpp_flax.trainers.step.builder import Loop, StepBuilder
from jaxpp_flax.trainers.step.builders import StepBuilders
from jaxpp_flax.trainers.step.compilation import Backend
from jaxpp_flax.trainers.step.diagnosis import first_loss_error
from jaxpp_flax.trainers.step.update import Update
from jaxpp_flax.trainers.trackers import NoopTracker, Tracker
from jaxpp_flax.trainers.tuning.auto_schedule import AutoSchedule
from jaxpp_flax.trainers.tuning.scheduling import Scheduled
from jaxpp_flax.trainers.tuning.stage_table import stage_table

__all__ = ["PipelineTrainer"]


class PipelineTrainer(HeldState, Scheduled, Inferring, Weights, Checkpointed):
    """Trains a Flax model, NNX or Linen, as a pipeline of stages.

    The model is an ordinary one whose layers are marked (`PipelineStage`, `@pipeline_stage`); it is copied, and stays
    as it is. A batch is a pytree of arrays of shape (batch, ...), cut into `num_microbatches` equal parts; each part
    gets the scalars in it unchanged.

    `loss_fn(model, microbatch)` returns the mean loss; or `(loss_sum, weight)`; or either with a dict of metrics:
    `(loss, metrics)`. The step's loss and gradients are those of the whole batch (see `jaxpp_flax.trainers.step.loss`).
    For NNX, `model` is the module. For Linen, `model(x, ...)` is `module.apply` with the current variables and the
    keys of this microbatch, and `model.params`, `model.variables`, `model.rngs`, `model.training` are at hand.

    A function with a parameter `training` is told by it whether it trains, and one with a parameter `rngs` gets the
    random numbers of its step and microbatch: an `nnx.Rngs` for NNX, a dict of keys for Linen. Both hold for `loss_fn`,
    `eval_loss_fn` and `predict_fn`.

    Args:
      model: an `nnx.Module`, or a Linen module, then with `variables=model.init(...)`.
      tx: an Optax optimizer; one whose update asks for `value` gets the loss of the whole batch.
      loss_fn: as above; traced, never run eagerly.
      num_stages: stages to cut the model into. One stage without a mesh runs under plain `jax.jit`.
      num_microbatches: parts of a batch.
      schedule: a name (`jaxpp_flax.schedules.names()`) or a `Schedule`; "auto" (or an `AutoSchedule`) measures the
        first steps and goes on with the best schedule that a search finds.
      mesh: a `jax.sharding.Mesh` with an axis "stage", or an `MpmdMesh`. None: one over `jax.devices()`; a mapping such
        as `{"data": 2}`: that one with other axes too. `MeshOptions` has the rest: groups of devices, sharding rules.
      assignment: which blocks form a stage: "even", "balanced", sizes such as `[3, 2, 3]`, a mapping of names (globs)
        to stages, a `Plan` or its JSON file, or a policy. `Assignment` and `Balanced` add costs and a memory limit.
      variables: of a Linen model: all collections that `init` returned.
      parameters: `Parameters(wrt=, frozen=, ema_decay=)`: which are trained, and whether an average of them is kept.
      remat: "full" recomputes in backward what lies between two marks; a `jax.checkpoint` policy says what is kept.
        Single blocks have their own, `PipelineStage(remat=)`.
      precision: `Precision(gradient_dtype=, loss_scale=, on_nonfinite=)`: number types, and losses that are not finite.
      inference: `Inference(eval_loss_fn=, predict_fn=)`, for `evaluate` and `predict`.
      seed: of the random numbers of a Linen model, and of `rngs` (the streams of an NNX model have their own).
        `RandomStreams` names a Linen model's streams too.
      logging: `Logging(tracker=, every=, progress=)`: where metrics go, and what is shown; False shows nothing.
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
        devices, assigned, streams = MeshOptions.of(mesh), Assignment.of(assignment), RandomStreams.of(seed)
        mesh, mesh_axes, num_ranks = devices.mesh, devices.axes, devices.num_ranks
        sharding_rules = devices.sharding_rules
        assignment, cost, memory_limit = assigned.how, assigned.cost, assigned.memory_limit
        seed, rng_names = streams.seed, streams.names
        parameters, precision = Parameters.of(parameters), Precision.of(precision)
        wrt, frozen, ema_decay = parameters.wrt, parameters.frozen, parameters.ema_decay
        gradient_dtype, loss_scale = precision.gradient_dtype, precision.loss_scale
        on_nonfinite = precision.on_nonfinite
        inference, logging, checkpoints = Inference.of(inference), Logging.of(logging), Checkpoints.of(checkpoints)
        eval_loss_fn, predict_fn = inference.eval_loss_fn, inference.predict_fn
        tracker, log_every, progress = logging.tracker, logging.every, logging.progress
        num_stages = check_count("num_stages", num_stages)
        self.num_microbatches = check_count("num_microbatches", num_microbatches)
        self._log_every = log_every
        check_functions(loss_fn=loss_fn)
        check_remat(remat, "PipelineTrainer")
        self._on_nonfinite = choose_on_nonfinite(on_nonfinite, loss_scale)
        skips = self._on_nonfinite == "skip"
        self._update = Update.of(tx, loss_scale, gradient_dtype, ema_decay, skips_nonfinite=skips)
        self._adapter, params, rest, notes = choose_model(model, variables, wrt, frozen, seed, rng_names)
        check_parameters(params, model)
        self._assigner = Assigner(assignment, cost, memory_limit)
        self._init_schedule(schedule, num_stages, num_ranks, mesh, mesh_axes)
        self._init_state(params, rest)
        rules = AxisRules.of(sharding_rules)
        specs = state_specs(self._state, notes, self.mesh, rules)
        self._backend = Backend(mesh=self.mesh, state_specs=specs, rules=rules)
        self._loss_fn = loss_fn
        self._eval_loss_fn = eval_loss_fn or loss_fn
        self._predict_fn = predict_fn or call_model
        untraced = StepBuilder(model=self._adapter, update=self._update, loss_fn=loss_fn, remat=remat)
        self._builders = StepBuilders(untraced, self.num_microbatches)
        self._executables: dict[Any, Any] = {}
        self._under_way = StepsUnderWay(self._on_nonfinite, tells=loss_scale is None)
        self._step = 0
        self._trained_on = BatchComparison(self.mesh, "training")
        self._shards = num_batch_shards(self.mesh)
        self._meter = choose_meter(progress)
        self._progress = progress
        # One process speaks for all.
        self.tracker: Tracker = tracker if tracker is not None and jax.process_index() == 0 else NoopTracker()
        self.stopping: str | None = None
        self._model_name = type(model).__name__
        self._init_checkpoints(checkpoints)

    # ------------------------------------------------------------------ what the trainer holds

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    def step_function(self, batch: Any) -> Callable[[TrainState, Any], Any]:
        """The pure function that a step compiles: `(state, microbatches) -> (state, metrics)`.

        `microbatches` has leaves of shape (num_microbatches, microbatch, ...). It also runs under plain `jax.jit`.
        """
        microbatches = split_batch(batch, self.num_microbatches, self._shards)
        return self._builders.for_training(self._state, microbatches).train(self._loop(self.num_microbatches))

    # ------------------------------------------------------------------ training

    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """Compile the training step for batches like this one, and print the table of stages; nothing is run.

        Args:
          batch: arrays, or their shapes (`jax.ShapeDtypeStruct`).
          global_batch_size: as in `fit`.

        Returns:
          What the step compiles to: see `jaxpp_flax.engine` (or JAX, for one stage without a mesh).

        Raises:
          ValueError, TypeError: whatever of model, loss, batch, stages, schedule and devices does not fit.
        """
        whole = self._whole(batch, global_batch_size)
        microbatches = split_batch(whole, self.num_microbatches, self._shards)
        key = self._key("train", microbatches)
        if key not in self._executables:
            count = parameter_count(self._state.params)
            with self._meter.phase(f"compiling {self.num_stages} stages, {count:,} parameters"):
                compiled = self._train_executable(microbatches)
            if self.mesh is not None:
                title = f"{self.num_stages} stages on {self.mesh.mpmd_dim} ranks, {self.schedule!r}"
                memory = {of.rank: of.argument_bytes + of.peak_bytes for of in compiled.memory_analysis()}
                self._meter.message(stage_table(compiled.stages, memory, title))
                for plan in self._assigner.news():
                    self._meter.message(plan.table())
        return self._executables[key]

    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]:
        """One optimizer step on a batch; compiles first where its shapes are new.

        Args:
          batch: leaves of shape (batch, ...).
          global_batch_size: as in `fit`.

        Returns:
          Metrics of the whole batch, at least `loss`: values that behave like arrays (`float(metrics["loss"])`).
          They are not waited for; those of two steps before are.

        Raises:
          BatchError: if the batch cannot be cut into microbatches, or has not the rows that this process reads.
          NonFiniteLossError: if the very first loss is not finite, and where that arose; or that of two steps before,
            see `Precision`.
          CheckpointSaveError: if a save in the background has failed since the last step.
          ValueError, TypeError: whatever else does not fit, before anything runs.
        """
        whole = self._whole(batch, global_batch_size)
        if self._tuner is not None and not self._tuner.done:
            return self._tuner.step(self, whole)
        microbatches = split_batch(whole, self.num_microbatches, self._shards)
        compiled = self._train_executable(microbatches)
        self._check_saves()
        if whole is batch:
            self._trained_on.before(microbatches)
        else:
            microbatches = rows_alike(compiled, batch, microbatches, self._trained_on)
        return self._finish_step(compiled(self._state, microbatches), microbatches)

    def _finish_step(self, results: Any, microbatches: Any) -> dict[str, Any]:
        self._state, metrics = results
        self._step += 1
        if self._first_loss_due and self._on_nonfinite != "ignore":
            self._check_first(metrics["loss"], microbatches)
        self._trained_on.after(metrics["loss"], self._step)
        self._under_way.add(self._step, metrics, self._meter)
        return metrics

    def training_steps(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder | None = None,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Train batch by batch in a loop of your own: yields `(step, metrics)` after each step is dispatched.

        With `Checkpoints(every=)` it saves as `fit` does: when it is time, and after the last step.

        Args:
          data, steps, epochs, global_batch_size, remainder: as in `fit`.

        Raises:
          CheckpointSaveError: if the directory holds later checkpoints.
        """
        rule = RemainderRule.of(remainder, global_batch_size, self.num_microbatches * self._shards, self._meter)
        with self._owned():
            if self._saves_by_itself:
                self._refuse_later_checkpoints()
            drawn = self._drawn_from(data)
            source = self._track(batches(data, steps=steps, epochs=epochs, drawn=drawn, remainder=rule))
            try:
                for number, batch in enumerate(source):
                    if not number:
                        self._check_filling(rule, batch)
                    metrics = self.train_step(batch, global_batch_size=global_batch_size)
                    self._after_step()
                    yield self._step, metrics
            except BaseException as error:  # a loop that is left by `break` too
                self._finish_saves(error)
                raise
            else:
                self._end_fit(lambda: False)
            finally:
                self._leave(source)

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
          steps: train so many; data that can be iterated again is passed over as often as it takes.
          epochs: passes over the data; needs data that can be iterated again. With neither, one pass.
          global_batch_size: None: each process passes the whole batches (leaves that it does not read may be shapes).
            A number: batches have so many examples, of which each process passes those that it reads, `rows_read`.
          remainder: of a batch with fewer examples than the first one, such as the last one of a pass: "drop" leaves
            it out where it cannot be cut into microbatches; "pad" repeats its last example, and the loss leaves these
            out by `batch["mask"]` (see `docs/trainer.md`); "error" refuses it. None: an error before the first step
            where data is a list, and otherwise "drop", with a message.
          eval_data: evaluated at the end, and every `eval_every` steps.
          eval_global_batch_size: the same as `global_batch_size`, for `eval_data`: see `evaluate`.
          callbacks: see `jaxpp_flax.trainers.callbacks`.
          resume: continue from the latest checkpoint, or without one from the state in memory; `steps` and `epochs`
            count from the beginning. "latest_valid" sets damaged checkpoints aside and takes the newest whole one.
          resume_data: how to find the place in data without `set_state`: "fast_forward" draws what was used and drops
            it, "refuse" raises, "restart" begins anew.

        Returns:
          The last metrics, as floats; those of the last evaluation as `eval_loss`, ...

        Raises:
          ValueError, TypeError: whatever does not fit, before the first step.
          NonFiniteLossError: see `train_step`.
          CorruptCheckpointError: if the latest checkpoint is damaged, unless `resume="latest_valid"`.
        """
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks holds a {type(callback).__name__}; subclass jaxpp_flax.trainers.Callback, or wrap a "
                    "function: OnMetrics(function, every=10)."
                )
        check_resume(resume)
        if eval_every is not None:
            check_count("eval_every", eval_every)
        if eval_data is not None and eval_every is not None and iter(eval_data) is eval_data:
            raise ValueError(
                f"eval_every={eval_every} needs eval_data that can be iterated again, but a "
                f"{type(eval_data).__name__} runs once. Pass a list."
            )
        self._meter = choose_meter(self._progress)
        self._agree_on_fit(
            steps=steps,
            epochs=epochs,
            global_batch_size=global_batch_size,
            remainder=remainder,
            resume=resume,
            eval_every=eval_every,
            eval_global_batch_size=eval_global_batch_size,
            eval_data=eval_data,
        )
        with self._owned():
            if not resume:
                self._refuse_later_checkpoints()
            position = self._resume(resume) if resume else None
            if resume and steps is not None:
                if self._step >= steps:
                    self._meter.message(f"nothing to do: step {self._step} of {steps} is done")
                    return {}
                steps -= self._step
            rule = RemainderRule.of(remainder, global_batch_size, self.num_microbatches * self._shards, self._meter)
            source = self._track(
                batches(
                    data, steps=steps, epochs=epochs, position=position, resume_data=resume_data, meter=self._meter,
                    drawn=self._drawn_from(data), remainder=rule,
                )
            )  # fmt: skip
            total = steps
            if isinstance(data, Sized):
                done = 0 if position is None else position.batches - position.epoch * source.left_out
                whole = (len(data) - source.left_out) * (epochs or 1) - done
                total = whole if steps is None else (min(steps, whole) if epochs is not None else steps)
            self.stopping = None
            self._begin_callbacks(callbacks, resumed=bool(resume))
            try:
                return run_fit(
                    self,
                    source,
                    total,
                    eval_data=eval_data,
                    eval_every=eval_every,
                    eval_global_batch_size=eval_global_batch_size,
                    callbacks=callbacks,
                    meter=self._meter,
                    log_every=self._log_every,
                    global_batch_size=global_batch_size,
                    first=lambda batch: self._check_filling(rule, batch),
                )
            finally:
                self._leave(source)

    def _call_together(self, call: str) -> None:
        await_same_call(self.mesh, self._state, call)

    def stop(self, reason: str) -> None:
        """End `fit` after the current step; callbacks call it."""
        self.stopping = reason

    def message(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        self._meter.message(text)

    # ------------------------------------------------------------------ inside

    def _check_filling(self, rule: RemainderRule, batch: Any) -> None:
        """Before a first step, make sure that the loss leaves out what `rule` fills batches with."""
        if rule.how == "pad":
            check_mask(batch)
            microbatches = split_batch(batch, self.num_microbatches, self._shards)
            found = self._builders.trace(self._state, microbatches)
            check_masked(found.weighed_by, found.unweighted)

    def _loop(self, num_microbatches: int) -> Loop:
        return Loop(num_microbatches=num_microbatches, schedule=self.schedule)

    def _key(self, kind: str, microbatches: Any) -> Any:
        return (kind, self.schedule, signature(microbatches), trace_settings())

    def _train_executable(self, microbatches: Any) -> Any:
        def build() -> Any:
            builder = self._builders.for_training(self._state, microbatches)
            return builder.train(self._loop(self.num_microbatches))

        compiled = self._executable("train", microbatches, build, donate=True)
        self._place_state(compiled)
        return compiled

    def _executable(self, kind: str, microbatches: Any, build: Callable[[], Any], *, donate: bool) -> Any:
        process_group().step = self._step + (kind == "train")  # for messages
        key = self._key(kind, microbatches)
        if key not in self._executables:
            if self.mesh is not None:  # else `jax.jit` decides
                refuse_disabled_jit("a pipelined step")
            compare_compilations(self.mesh, self._state, kind, self.schedule, microbatches)
            policy = self._cut_policy(kind, microbatches)
            state = self._state if donate else self._state_for_inference()
            self._executables[key] = self._backend.compile(build(), state, microbatches, policy, donate=donate)
        return self._executables[key]

    def _check_first(self, loss: Any, microbatches: Any) -> None:
        """Wait for the first loss; where it is not finite, find out why on the way it was computed."""
        initial, self._initial, self._first_loss_due = self._initial, None, False
        value = float(loss)
        if np.isfinite(value):
            return
        raise first_loss_error(
            value, initial, self._adapter, self._loss_fn, microbatches, self.num_microbatches, self.mesh
        )
