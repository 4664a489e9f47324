"""The options of training (what is trained, with which random numbers) and of inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from flax import nnx

from jaxpp_flax.counts import check_count
from jaxpp_flax.globs import NameFilter
from jaxpp_flax.trainers.model.calling import check_functions
from jaxpp_flax.trainers.model.frozen import check_frozen
from jaxpp_flax.trainers.options.base import Options, misfit
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.microbatch_orders import OrderRule
from jaxpp_flax.trainers.step.nonfinite import OnNonFinite
from jaxpp_flax.trainers.writes.after_update import AfterUpdate, check_after_update

__all__ = ["Inference", "Training"]


@dataclass(frozen=True, kw_only=True)
class Training(Options):
    """The options of training: what is trained, and with which random numbers: `training=`.

    Args:
      wrt: an NNX filter that selects the variables to train; the optimizer does not change other variables.
      frozen: parameters that are not trained: globs of their paths (`"embed/*"`), or a function of the path.
      ema_decay: the decay of a moving average of the trained parameters, kept in float32 or wider. Use the average by
        `gather_model(ema=True)` or `Inference(params=lambda state: state.ema)`. None: no average.
      on_nonfinite: "stop" raises `NonFiniteLossError` two steps after a loss that is not finite, and before anything
        is saved. "skip" skips a step whose loss or gradients are not finite. "ignore" continues. "stop" and "skip"
        check the parameters before each save to the directory of `checkpoints=`. None: "stop", or "skip" with a loss
        scale (`Precision`).
      after_update: changes variables once a step, inside the compiled step, after the optimizer. For NNX,
        `after_update(model, metrics)` gets the module, and writes any of its variables in place: trained, frozen and
        others. For Linen, `after_update(variables, metrics)` gets a dict of all collections and returns all of them.
        The model has the new weights, in the type in which they are stored. What the model writes while
        the loss calls it goes from microbatch to microbatch, so `self.load[...] += tokens` has the sum over the batch
        (`metrics` of the loss are those of the whole batch too). Such a variable is not reset by itself: set it to zero
        in the function. The average of `ema_decay` gets what the function writes; a step that is skipped skips it.
      max_batch_shapes: how many different shapes of batches one schedule may train on, such as lengths of padded texts.
        Each shape is compiled by itself, and a message says so. A batch with one more shape is refused.
      order: in which order the microbatches of `Microbatches` run: "cost" chooses it by the simulator from the FLOPs of
        their shapes, so that ranks wait less; "given" keeps that of the data, and so does a loss that hands state from
        one microbatch to the next or draws random keys.
      seed: the seed of a Linen model's random numbers, of `rngs`, and of functions that make a model (the streams of an
        NNX module have their own seeds).

    Raises:
      TypeError, ValueError: if a field has a value that does not fit; the message names the field.

    Example:
      >>> Training(frozen=["embed/*", "blocks/[01]"], ema_decay=0.999).ema_decay
      0.999
      >>> def follow(model, metrics):  # a teacher is the moving average of its student
      ...     student = nnx.state(model.student, nnx.Param)
      ...     teacher = nnx.state(model.teacher, nnx.Param)
      ...     nnx.update(model.teacher, jax.tree.map(lambda t, s: 0.99 * t + 0.01 * s, teacher, student))
      >>> training = Training(wrt=nnx.All(nnx.Param, nnx.PathContains("student")), after_update=follow)
    """

    wrt: nnx.filterlib.Filter = nnx.Param
    frozen: NameFilter | None = None
    ema_decay: float | None = None
    on_nonfinite: OnNonFinite | None = None
    after_update: AfterUpdate | None = None
    max_batch_shapes: int = 32
    order: OrderRule = "cost"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.frozen is not None:
            check_frozen(self.frozen)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay!r}: it must lie between 0 and 1, e.g. 0.999, or be None.")
        if self.on_nonfinite is not None and self.on_nonfinite not in get_args(OnNonFinite):
            raise ValueError(f'on_nonfinite={self.on_nonfinite!r}: it must be "stop", "skip" or "ignore".')
        if self.after_update is not None:
            check_after_update(self.after_update)
        check_count("max_batch_shapes", self.max_batch_shapes)
        if self.order not in get_args(OrderRule):
            raise ValueError(f'order={self.order!r}: it must be "cost" or "given".')
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)):
            raise misfit("seed", self.seed, "a whole number")

    def rule(self, *, scaled: bool) -> OnNonFinite:
        """Return `on_nonfinite`, or its default value: "stop", but "skip" if the loss is scaled, which skips anyway.

        Raises:
          ValueError: for another rule than "skip" with a scaled loss.
        """
        if scaled and self.on_nonfinite in ("stop", "ignore"):
            raise ValueError(
                f"on_nonfinite={self.on_nonfinite!r} does not work with a loss scale (precision=), which must skip a "
                'step whose scaled gradients overflow. Leave on_nonfinite out, or set it to "skip".'
            )
        return self.on_nonfinite or ("skip" if scaled else "stop")


@dataclass(frozen=True, kw_only=True)
class Inference(Options):
    """The functions of `evaluate` and `predict`, and the weights that they use: `inference=`.

    Args:
      params: a function of the `TrainState` that returns the weights for `evaluate`, `predict`, `generate` and
        `export_pretrained`: a tree like `state.params`, such as `lambda state: state.ema` (a moving average), or, for
        schedule-free optimizers, `lambda state: optax.contrib.schedule_free_eval_params(state.opt_state,
        state.params)`. It is traced, and its result is converted to the parameters' dtypes. None: the trained weights.
        `Checkpoints(best=)` compares the losses of these weights; a checkpoint holds the whole state, from which they
        are computed again. `trainer.gather_model()` returns the trained weights.
      eval_loss_fn: the loss function of `evaluate`; by default the trainer's `loss_fn`. An NNX model is in `eval()`
        mode.
      predict_fn: `(model, microbatch) -> outputs` for `predict`; by default `model(microbatch)`, with `training=False`
        or `deterministic=True` if the model's `__call__` has such a boolean argument.

    Raises:
      TypeError: if one of these is not a function that takes such arguments.

    Example:
      >>> Inference(predict_fn=lambda model, batch: model(batch["x"])).eval_loss_fn is None
      True
    """

    eval_loss_fn: Callable[..., Any] | None = None
    predict_fn: Callable[..., Any] | None = None
    params: Callable[[TrainState], Any] | None = None

    def __post_init__(self) -> None:
        if self.params is not None and not callable(self.params):
            raise misfit("params", self.params, "a function of the state, such as `lambda state: state.ema`")
        check_functions(eval_loss_fn=self.eval_loss_fn, predict_fn=self.predict_fn)
