"""`PipelineTrainer` trains an ordinary Flax model as a pipeline. The class makes its parts and calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from jaxpp_flax.checkpoint.format.paths import PathFilter
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.planning import Plan, PlanningStep, StepProfile
from jaxpp_flax.pretrained import IDENTITY, NameMap
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.checkpoints import Checkpointing, Resume
from jaxpp_flax.trainers.data.batch_sharding import InferenceKind, ProcessInputs
from jaxpp_flax.trainers.data.position import ResumeData
from jaxpp_flax.trainers.data.remainder import Remainder
from jaxpp_flax.trainers.decorators import described_by, refuse_renamed
from jaxpp_flax.trainers.generation.generator import Generator
from jaxpp_flax.trainers.loop.evaluation import Evaluation
from jaxpp_flax.trainers.loop.fit_arguments import FitArguments
from jaxpp_flax.trainers.loop.hooks import StepHook
from jaxpp_flax.trainers.loop.trackers import NoopTracker, Tracker
from jaxpp_flax.trainers.loop.train_step import TrainStep
from jaxpp_flax.trainers.loop.training_loop import TrainingLoop
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics
from jaxpp_flax.trainers.options import (
    Checkpoints,
    Inference,
    Logging,
    Memory,
    MeshOptions,
    Parameters,
    Precision,
    RandomStreams,
)
from jaxpp_flax.trainers.options.assignment import AssignmentLike
from jaxpp_flax.trainers.parts import make_core, make_parts, make_scheduling
from jaxpp_flax.trainers.planned import Planned, take_plan
from jaxpp_flax.trainers.scheduling import Scheduling
from jaxpp_flax.trainers.state.pretrained import SHARD_BYTES, PretrainedWeights
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.state.weights import Weights

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
      model: an `nnx.Module`; or a Linen module, together with `variables=`; or, for a model larger than a device, a
        function that makes an `nnx.Module`: `lambda rngs: GPT(config, rngs=rngs)`. It gets `nnx.Rngs(seed)` (without
        parameters, nothing) and is traced; each leaf is made on its ranks, with the bits of the ordinary construction.
        An abstract module (`nnx.eval_shape`) needs values before training: `restore`, `fit(resume=True)`.
      tx: an Optax optimizer. An optimizer whose update asks for `value` gets the loss of the whole batch.
      loss_fn: as above; or a `WholeBatchLoss`. The function is traced and never runs eagerly.
      num_stages: stages to cut the model into. One stage on one device runs under plain `jax.jit`.
      num_microbatches: parts of a batch.
      schedule: a name (`jaxpp_flax.schedules.names()`) or a `Schedule`; None: "1f1b".
      plan: a `jaxpp_flax.planning.Plan` or its JSON file, made beforehand (`planning.plan`). It gives the stages, the
        schedule, the number of microbatches, the residuals and the axes of the mesh, which may be left out then.
      mesh: None: all of `jax.devices()`, and those of a stage share the examples of a microbatch. A mapping says what
        each stage takes: `{"data": 2}` two devices, `{}` one. A `jax.sharding.Mesh` with an axis "stage", or an
        `MpmdMesh`, names the devices. `MeshOptions` has more: groups of devices, sharding rules.
      assignment: which blocks form a stage: "auto" (even or balanced, by the estimated step), "even", "balanced",
        sizes such as `[3, 2, 3]`, a mapping of names (globs) to stages, a `Plan` or its JSON file, or a policy.
      variables: for a Linen model: all collections that `init` returned; or a function of `jax.random.key(seed)` that
        makes them, each leaf on its ranks: `lambda key: model.init(key, x)`.
      parameters: `Parameters(wrt=, frozen=, ema_decay=)`: the parameters to train, and their moving average.
      remat: "full" recomputes the values between two marks in backward; a `jax.checkpoint` policy selects the values to
        keep. `PipelineStage(remat=)` sets it for one block.
      precision: `Precision(gradient_dtype=, loss_scale=, on_nonfinite=)`: number types, and losses that are not finite.
      inference: `Inference(eval_loss_fn=, predict_fn=, params=)`, for `evaluate`, `predict` and export.
      seed: the seed of a Linen model's random numbers, of `rngs`, and of functions that make a model (the streams of an
        NNX module have their own seeds). `RandomStreams` names a Linen model's streams too.
      logging: `Logging(tracker=, every=, progress=)`: metrics and the progress display; False shows nothing.
      checkpoints: a directory, or `Checkpoints(directory, every=, keep=, ...)`; see `docs/guides/checkpointing.md`.
      memory: `Memory(optimizer_state="pinned_host", residuals=ResidualPlan(...))`: what lies in host memory or is
        recomputed; see `docs/guides/memory.md`.

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
        model: nnx.Module | nn.Module | Callable[..., nnx.Module],
        tx: optax.GradientTransformation,
        loss_fn: Callable[..., Any],
        *,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | Schedule | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        mesh: Mesh | MpmdMesh | Mapping[str, int] | MeshOptions | None = None,
        assignment: AssignmentLike = "auto",
        variables: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
        parameters: Parameters | None = None,
        remat: Literal["full"] | Callable[..., bool] | None = None,
        precision: Precision | None = None,
        inference: Inference | None = None,
        seed: int | RandomStreams = 0,
        logging: Logging | bool = True,
        checkpoints: str | os.PathLike[str] | Checkpoints | None = None,
        memory: Memory | None = None,
    ) -> None:
        logged = Logging.of(logging)
        chosen = take_plan(plan, Planned(
            num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, assignment=assignment,
            mesh=MeshOptions.of(mesh), memory=Memory.of(memory),
        ))  # fmt: skip
        self._core = make_core(
            model,
            tx,
            loss_fn,
            scheduling=make_scheduling(chosen),
            devices=chosen.mesh,
            assignment=chosen.assignment,
            variables=variables,
            parameters=Parameters.of(parameters),
            remat=remat,
            precision=Precision.of(precision),
            streams=RandomStreams.of(seed),
            memory=chosen.memory,
            logging=logged,
        )  # fmt: skip
        self._parts = make_parts(self._core, Inference.of(inference), logged, Checkpoints.of(checkpoints))
        sends = jax.process_index() == 0  # one process sends for all
        self.tracker: Tracker = logged.tracker if sends and logged.tracker is not None else NoopTracker()
        self.log_every = logged.every
        self.stopping: str | None = None

    # ------------------------------------------------------------------ the trainer's attributes

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self._core.held.step

    @property
    def num_microbatches(self) -> int:
        """The number of parts of a batch."""
        return self._core.scheduling.num_microbatches

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self._core.scheduling.num_stages

    @property
    def schedule(self) -> Schedule | None:
        """The schedule; None if one stage on one device runs under plain `jax.jit`."""
        return self._core.scheduling.schedule

    @property
    def mesh(self) -> MpmdMesh | None:
        """The mesh of the ranks; None if one stage on one device runs under plain `jax.jit`."""
        return self._core.scheduling.mesh

    @property
    def plan(self) -> Plan | None:
        """The plan of the training, to be saved; None before the training step is compiled, and without a pipeline."""
        return self._core.assigner.plan_of(self.schedule, self.num_microbatches)

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state, the rest of the model's state, and the step, without a copy.

        The next `train_step` reuses the memory of these arrays. To keep weights, use `trainer.model`. Before the first
        step, the state is made now: on the ranks, where each gets its share.
        """
        return self._core.held.whole()

    @property
    @described_by(Weights.model)
    def model(self) -> Any:
        return self._parts.weights.model()

    @property
    @described_by(Weights.abstract_model)
    def abstract_model(self) -> Any:
        return self._parts.weights.abstract_model()

    @property
    @described_by(Weights.ema_model)
    def ema_model(self) -> Any:
        return self._parts.weights.ema_model()

    @property
    @described_by(Weights.variables)
    def variables(self) -> dict[str, Any]:
        return self._parts.weights.variables()

    @described_by(Weights.set)
    def set_weights(self, weights: Any) -> None:
        self._parts.weights.set(weights)

    # ------------------------------------------------------------------ training

    def step_function(self, batch: Any) -> Callable[[TrainState, Any], Any]:
        """Return the pure function that a step compiles: `(state, microbatches) -> (state, metrics)`.

        `microbatches` has leaves of shape (num_microbatches, microbatch, ...). The function also runs under plain
        `jax.jit`.
        """
        return self._core.executables.training_function(self._core.rows.split(batch))

    @described_by(TrainStep.compile)
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        return self._parts.train_step.compile(batch, global_batch_size=global_batch_size)

    @described_by(TrainStep.step)
    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]:
        whole = self._core.rows.whole(batch, global_batch_size)
        return self._parts.train_step.step(batch, whole)

    @described_by(TrainingLoop.steps)
    def training_steps(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder | None = None,
        hooks: Sequence[StepHook] = (),
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        return self._parts.loop.steps(
            self, data,
            steps=steps, epochs=epochs, global_batch_size=global_batch_size, remainder=remainder, hooks=hooks,
        )  # fmt: skip

    @described_by(TrainingLoop.fit)
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
        arguments = FitArguments(
            steps=steps, epochs=epochs, global_batch_size=global_batch_size, remainder=remainder, eval_data=eval_data,
            eval_every=eval_every, eval_global_batch_size=eval_global_batch_size, callbacks=callbacks, resume=resume,
            resume_data=resume_data,
        )  # fmt: skip
        return self._parts.loop.fit(self, data, arguments)

    @property
    def measures(self) -> RunMetrics:
        """The time, the units and the operations of the run, for `LogMetrics`."""
        return self._core.measures

    def stop(self, reason: str) -> None:
        """End `fit` or `training_steps` after this step; several processes end together, up to four steps later."""
        self.stopping = reason

    def message(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        self._parts.display.message(text)

    # ------------------------------------------------------------------ inference, data, schedules, checkpoints

    @described_by(Evaluation.evaluate)
    def evaluate(self, data: Iterable[Any], *, global_batch_size: int | None = None) -> dict[str, Any]:
        return self._parts.evaluation.evaluate(data, global_batch_size=global_batch_size)

    @described_by(Evaluation.predict)
    def predict(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        return self._parts.evaluation.predict(batch, global_batch_size=global_batch_size)

    @described_by(Generator.generate)
    def generate(
        self, prompts: Any, *, max_new_tokens: int, lengths: Any = None, temperature: float = 0.0, seed: int = 0,
        top_k: int | None = None, top_p: float | None = None, eos_token_id: int | Sequence[int] | None = None,
        prefill: int = 1, groups: int | None = None, cache_length: int | None = None, cache_dtype: Any = None,
    ) -> list[np.ndarray]:  # fmt: skip
        return self._parts.generator.generate(
            prompts, max_new_tokens=max_new_tokens, lengths=lengths, temperature=temperature, seed=seed, top_k=top_k,
            top_p=top_p, eos_token_id=eos_token_id, prefill=prefill, groups=groups, cache_length=cache_length,
            cache_dtype=cache_dtype,
        )  # fmt: skip

    @described_by(ProcessInputs.leaves_read)
    def leaves_read(self, batch: Any) -> Any:
        return self._parts.inputs.leaves_read(batch)

    @described_by(ProcessInputs.rows_read)
    def rows_read(self, batch: Any, call: Literal["train"] | InferenceKind = "train") -> Any:
        return self._parts.inputs.rows_read(batch, call)

    @described_by(Scheduling.use)
    def use_schedule(self, schedule: Any, num_stages: int | None = None) -> None:
        self._core.scheduling.use(schedule, num_stages)

    @described_by(TrainStep.profile_step)
    def profile_step(self, batch: Any, *, global_batch_size: int | None = None) -> StepProfile:
        return self._parts.train_step.profile_step(batch, global_batch_size=global_batch_size)

    def planning_step(self, batch: Any) -> PlanningStep:
        """Return the training step for batches like this one as `jaxpp_flax.planning.plan` needs it.

        Raises:
          ValueError: without a pipeline.
        """
        return self._core.executables.to_plan(self._core.rows.split(batch))

    @described_by(Checkpointing.save)
    def save(
        self, where: str | os.PathLike[str] | int | None = None, *, only: PathFilter | None = None, wait: bool = True
    ) -> Path:
        return self._parts.checkpoints.save(where, only=only, wait=wait)

    @described_by(Checkpointing.restore)
    def restore(
        self, where: str | os.PathLike[str] | int = "latest", *, only: PathFilter | None = None,
        rename: Mapping[str, str] | None = None, missing: Literal["error", "keep"] = "error", low_memory: bool = False,
    ) -> None:  # fmt: skip
        self._parts.checkpoints.restore(where, only=only, rename=rename, missing=missing, low_memory=low_memory)

    @described_by(PretrainedWeights.load)
    def load_pretrained(
        self, source: str | os.PathLike[str], *, map: NameMap = IDENTITY, cast: bool = False, untie: bool = False,
        keep: PathFilter = (),
    ) -> None:  # fmt: skip
        self._parts.pretrained.load(source, map=map, cast=cast, untie=untie, keep=keep)

    @described_by(PretrainedWeights.export)
    def export_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        map: NameMap = IDENTITY,
        only: PathFilter | None = None,
        config: Mapping[str, Any] | None = None,
        max_shard_bytes: int = SHARD_BYTES,
        ema: bool = False,
        merge_adapters: bool = True,
    ) -> Path:
        return self._parts.pretrained.export(
            directory, map=map, only=only, config=config, max_shard_bytes=max_shard_bytes, ema=ema,
            merge_adapters=merge_adapters,
        )  # fmt: skip
