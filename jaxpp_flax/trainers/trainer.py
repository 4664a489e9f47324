"""`PipelineTrainer` trains an ordinary Flax model as a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.planning import Plan
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.accumulation import AccumulationCalls
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.checkpoints import Resume
from jaxpp_flax.trainers.data.remainder import Remainder
from jaxpp_flax.trainers.data.source import ResumeData
from jaxpp_flax.trainers.files import FileCalls
from jaxpp_flax.trainers.generation.generator import GenerationCalls
from jaxpp_flax.trainers.loop.fit_arguments import FitArguments
from jaxpp_flax.trainers.options import Checkpoints, Inference, Logging, Memory, MeshOptions, Precision, Training
from jaxpp_flax.trainers.options.planned import Planned, take_plan
from jaxpp_flax.trainers.stages.assignment import AssignmentLike
from jaxpp_flax.trainers.trackers import CompositeTracker, Tracker
from jaxpp_flax.trainers.trackers.guarded import GuardedTracker
from jaxpp_flax.trainers.weight_transfer.transfer import TransferCalls

__all__ = ["PipelineTrainer"]


class PipelineTrainer(AccumulationCalls, GenerationCalls, TransferCalls, FileCalls):
    """Trains a Flax model, NNX or Linen, as a pipeline of stages.

    The model is an ordinary model with marked layers (`PipelineStage`, `@pipeline_stage`). The trainer copies the model
    and does not change it. A batch is a pytree of arrays of shape (batch, ...), cut into `num_microbatches` equal
    parts. Scalars in the batch go to each part unchanged.

    `loss_fn(model, microbatch)` returns the mean loss; or `(loss_sum, weight)`; or either with a dict of metrics:
    `(loss, metrics)`. The step's loss and gradients are those of the whole batch; `docs/guides/loss.md` has the rule.
    For NNX, `model` is the module. For Linen, `model(x, ...)` is `module.apply` with the current variables and the
    keys of this microbatch; it has the attributes `params`, `variables`, `rngs` and `training`.

    `loss_fn`, `eval_loss_fn` and `predict_fn` may have two more parameters. `training` is True in training. `rngs` gets
    the random keys of this step and microbatch: an `nnx.Rngs` for NNX, a dict of keys for Linen.

    Args:
      model: an `nnx.Module`; or a Linen module, together with `variables=`; or, for a model larger than a device, a
        function that makes an `nnx.Module`: `lambda rngs: GPT(config, rngs=rngs)`. It is called with `nnx.Rngs(seed)`,
        or without arguments if it has no parameters. The call is traced; each leaf is made by itself on its ranks, and
        all ranks get the same bits. An abstract module (`nnx.eval_shape`) needs values before training: call `restore`
        or `fit(resume=True)`.
      tx: an Optax optimizer. An optimizer whose update asks for `value` gets the loss of the whole batch.
      loss_fn: as above; or a `WholeBatchLoss`. The function is traced and never runs eagerly.
      num_stages: the number of stages of the model. One stage on one device runs under plain `jax.jit`.
      num_microbatches: the number of equal parts of a batch.
      schedule: a name (`jaxpp_flax.schedules.names()`) or a `Schedule`; None: "1f1b".
      plan: a `jaxpp_flax.planning.Plan` or its JSON file, as `planning.plan` makes it. It gives the stages, the
        schedule, the number of microbatches, the residuals and the axes of the mesh; leave out the arguments for these.
      mesh: the devices. None uses all of `jax.devices()`, and the devices of a stage share the examples of a
        microbatch. A mapping gives the axes of each stage: `{"data": 2}` takes two devices for a stage, `{}` one. A
        `jax.sharding.Mesh` with an axis "stage", or an `MpmdMesh`, names the devices. `MeshOptions` has more: several
        stages on a group of devices, sharding rules.
      assignment: which blocks form a stage: "auto" (even, or balanced if the estimated step is clearly shorter),
        "even", "balanced", sizes such as `[3, 2, 3]`, a mapping of names (globs) to stages, a `Plan` or its JSON file,
        or a policy.
      variables: for a Linen model: all collections that `init` returned; or a function of `jax.random.key(seed)` that
        makes them, each leaf on its ranks: `lambda key: model.init(key, x)`.
      training: `Training(wrt=, frozen=, ema_decay=, on_nonfinite=, after_update=, seed=)`: the trained parameters and
        their moving average, losses that are not finite, a function that runs once a step, random numbers.
      precision: "bfloat16" or "float16": the model computes in this type; parameters, sums of gradients and the loss
        stay float32. `Precision(compute=, params=, gradients=, loss_scale=)` has more.
      memory: `Memory(remat="full", residuals=ResidualPlan(...), optimizer_state="pinned_host")`: what is recomputed,
        and what is kept in host memory; see `docs/guides/memory.md`.
      inference: `Inference(eval_loss_fn=, predict_fn=, params=)`, for `evaluate`, `predict` and export.
      logging: `Logging(tracker=, every=, progress=, messages=)`: metrics, progress and messages; False shows nothing.
      checkpoints: a directory, or `Checkpoints(directory, every=, keep=, ...)`; see `docs/guides/checkpointing.md`.

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
      >>> trainer.gather_model()(batch["x"]).shape  # an ordinary module with the current weights
      (8, 4)
    """

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
        training: Training | None = None,
        precision: Precision | DTypeLike | None = None,
        memory: Memory | None = None,
        inference: Inference | None = None,
        logging: Logging | bool = True,
        checkpoints: str | os.PathLike[str] | Checkpoints | None = None,
    ) -> None:
        logged = Logging.of(logging)
        chosen = take_plan(plan, Planned(
            num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, assignment=assignment,
            mesh=MeshOptions.of(mesh), memory=Memory.of(memory),
        ))  # fmt: skip
        super().__init__(
            model, tx, loss_fn, chosen=chosen, variables=variables, training=Training.of(training),
            precision=Precision.of(precision), inference=Inference.of(inference), logging=logged,
            checkpoints=Checkpoints.of(checkpoints),
        )  # fmt: skip
        sends = jax.process_index() == 0  # one process sends for all
        self.tracker: Tracker = logged.tracker if sends and logged.tracker is not None else CompositeTracker()
        self.guarded_tracker = GuardedTracker(self.tracker)
        """`tracker` for the trainer's own callbacks: its errors are warnings."""
        self.log_every = logged.every
        self.config = logged.run_config
        self.stopping: str | None = None
        self.callbacks: Sequence[Callback] = ()
        """The callbacks of the current loop, in order."""

    def training_steps(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Train batch by batch in your own loop: yield `(step, metrics)` after each step is dispatched.

        With `Checkpoints(every=)` the loop saves as `fit` does: when a save is due, and after the last step. After
        SIGTERM it yields the step, saves it and raises `SystemExit(75)`. With the callbacks `LogMetrics` and `Evaluate`
        the loop logs and evaluates as `fit` does.

        Args:
          data, steps, epochs, global_batch_size, remainder: as in `fit`.
          callbacks: called after each step, before a save and before the loop's body. `trainer.stop` ends the loop.

        Raises:
          TypeError, ValueError: for arguments that do not fit, at the call; also if a callback has the hook
            `on_metrics`, and `callbacks` has no `LogMetrics` that calls it.
          CheckpointSaveError: if the directory holds later checkpoints, before the first step.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from flax import nnx
          >>> from jaxpp_flax import DictTracker, PipelineTrainer
          >>> from jaxpp_flax.trainers import Logging, LogMetrics
          >>> tracker = DictTracker()
          >>> trainer = PipelineTrainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
          ...                           lambda model, x: (model(x) ** 2).mean(), num_stages=1, num_microbatches=2,
          ...                           logging=Logging(tracker=tracker, every=2, progress=False, messages=False))
          >>> for step, metrics in trainer.training_steps([jnp.ones((4, 2))], steps=4, callbacks=[LogMetrics()]):
          ...     pass
          >>> sorted(tracker["loss"])  # the first step, the last one, and each second one
          [1, 2, 4]
        """
        self._check_ready("training_steps")
        return self.loop.steps(
            self, data,
            steps=steps, epochs=epochs, global_batch_size=global_batch_size, remainder=remainder, callbacks=callbacks,
        )  # fmt: skip

    def fit(
        self,
        data: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder | None = None,
        eval_data: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        eval_every: int | None = None,
        eval_steps: int | None = None,
        eval_global_batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        resume_data: ResumeData = "fast_forward",
    ) -> dict[str, Any]:
        """Train on `data`.

        Args:
          data: an iterable of batches: a list, a generator, a grain dataset or loader. A batch is a pytree of arrays,
            cut into `num_microbatches` equal parts; or `jaxpp_flax.Microbatches`: any number of parts, each of its own
            shape. Then a mean loss counts every example, and a new shape is compiled, up to
            `Training(max_batch_shapes=)`; without a mesh, each list of shapes counts.
          steps: the number of steps to train; with `resume`, counted from the beginning of the run. Data that can be
            iterated again is repeated as needed.
          epochs: the number of passes over the data; it must be possible to iterate over the data again. Without
            `steps` and `epochs`, `fit` makes one pass.
          global_batch_size: None: each process passes whole batches (a leaf that the process does not read may be a
            `jax.ShapeDtypeStruct`). A number: the number of examples in a batch; each process passes only the examples
            that it reads, see `rows_read`. `Microbatches` say so themselves (`own_rows=`): leave it None.
          remainder: the rule for a batch with fewer examples than the first one, such as the last one of a pass. "drop"
            leaves it out. "error" refuses the batch. None: an error before the first step if data is a list, else
            "drop", with a message. A batch with more examples than the first one is refused.
          eval_data: data to evaluate at the end, and every `eval_every` steps: see `evaluate`. A mapping names several
            sets; `EarlyStopping` and `Checkpoints(best=)` name a metric of one of them: "eval_<set>/loss".
          eval_every: the number of steps between two evaluations. None: only at the end. Without `eval_data`, an error.
          eval_steps: the most batches of each set in one evaluation. None: all of them.
          eval_global_batch_size: as `global_batch_size`, for `eval_data`: see `evaluate`.
          callbacks: see `jaxpp_flax.trainers.callbacks`.
          resume: True continues from the latest checkpoint, or from the state in memory if there is no checkpoint;
            `steps` and `epochs` count from the beginning. "latest_valid" renames damaged checkpoints and continues from
            the newest complete one. A number goes back to that step; later checkpoints become `<step>.abandoned`.
          resume_data: how to find the position in data without `set_state` or `load_state_dict`: "fast_forward" draws
            the used batches and drops them, "refuse" raises `DataPositionError`, "restart" starts the data again.

        Returns:
          The metrics of the last step as floats, and those of the last evaluation as `eval_loss`, ... If a resumed run
          has no step left, these are the metrics in its checkpoint.

        Raises:
          ValueError, TypeError: for arguments that do not fit, before the first step.
          NonFiniteLossError: see `train_step`.
          CorruptCheckpointError: if the latest checkpoint is damaged, unless `resume="latest_valid"`.
        """
        self._check_ready("fit")
        arguments = FitArguments(
            steps=steps, epochs=epochs, global_batch_size=global_batch_size, remainder=remainder, eval_data=eval_data,
            eval_every=eval_every, eval_steps=eval_steps, eval_global_batch_size=eval_global_batch_size,
            callbacks=callbacks, resume=resume, resume_data=resume_data,
        )  # fmt: skip
        return self.loop.fit(self, data, arguments)

    def stop(self, reason: str) -> None:
        """End `fit` or `training_steps` after this step; several processes end together, up to four steps later.

        `fit` saves and evaluates the step that it ends with, as it does with the last one.
        """
        self.stopping = reason
