"""Compute a step's new state from its summed gradients: loss scale, optimizer, moving average of the weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpp_flax.planning.planner import TracedUpdate
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.state.optimizer_memory import ON_DEVICES, OptimizerMemory, fetched, put_back
from jaxpp_flax.trainers.state.optimizer_state import shapes_of_init
from jaxpp_flax.trainers.state.train_state import TrainState, first_average, parameter_of, shapes_of
from jaxpp_flax.trainers.step.metrics import NO_METRICS, StepMetrics


@dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """A loss scale that adapts: it shrinks after a gradient that is not finite, and grows after many good steps.

    Args:
      initial: the scale of the first step.
      growth_interval: the number of consecutive steps with finite gradients after which the scale grows.
      factor: the scale is multiplied by this number to grow, and divided by it to shrink.

    Raises:
      ValueError: for a number that is out of range.

    Example:
      >>> DynamicLossScale(growth_interval=500).initial
      65536.0

    The rule is that of Micikevicius et al., "Mixed Precision Training", 2018, and of Flax's `DynamicScale`.
    """

    initial: float = 65536.0
    growth_interval: int = 2000
    factor: float = 2.0

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range."""
        if not (0 < self.initial < math.inf and self.growth_interval >= 1 and 1 < self.factor < math.inf):
            raise ValueError(f"{self!r}: initial must be above 0, growth_interval at least 1 and factor above 1.")

    def start(self) -> dict[str, jax.Array]:
        """Return the scale's state before the first step."""
        return {"scale": jnp.float32(self.initial), "good_steps": jnp.int32(0)}

    def after(self, state: dict[str, Any], finite: Any) -> dict[str, Any]:
        """Return the scale's state after a step; `finite` says if all its gradients were finite."""
        good = jnp.where(finite, state["good_steps"] + 1, 0)
        grow = good >= self.growth_interval
        larger = jnp.where(grow, state["scale"] * self.factor, state["scale"])
        larger = jnp.where(jnp.isfinite(larger), larger, state["scale"])
        smaller = jnp.maximum(state["scale"] / self.factor, jnp.finfo(jnp.float32).tiny)
        return {"scale": jnp.where(finite, larger, smaller), "good_steps": jnp.where(grow, 0, good)}


_LACKS_AN_ARGUMENT = ("required keyword-only argument", "must be provided")  # Python's words, and those of Optax
_STEP_HAS = (
    "A step of a pipeline gives the optimizer the gradients, the parameters and the loss of the whole batch (`value`), "
    "and does not compute the loss again. Use an optimizer without line search and without estimates of the Hessian, "
    "such as optax.adamw(3e-4); optax.lbfgs(learning_rate, linesearch=None) is one too, and optax.contrib.sam without "
    "opaque_mode."
)
_ITS_STATE = "The trainer keeps a state of its own for it (`trainer.state.opt_state`), and begins with a new one."


def _takes_value(tx: Any) -> bool:
    """Return True if the signature of the optimizer's update takes the loss, as `value` or as any other argument."""
    try:
        parameters = inspect.signature(tx.update).parameters
    except (TypeError, ValueError):
        return False
    return "value" in parameters or any(of.kind is of.VAR_KEYWORD for of in parameters.values())


AfterOptimizer = Callable[[Any, Any, dict[str, Any]], tuple[Any, Any]]
"""Takes the new parameters, the model's state and the metrics of the update; returns both as they are to be."""


def _chosen(finite: Any, after: Any, before: Any) -> Any:
    """Return the values before the step if it is not finite; a value that the step leaves alone is not computed."""
    return jax.tree.map(lambda a, b: b if a is b else jnp.where(finite, a, b), after, before)


def _check_shapes(updates: Any, params: Any) -> None:
    """Refuse updates that addition would broadcast to the parameters."""
    for (path, param), update in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(updates), strict=False):
        if jnp.shape(update) != param.shape:
            raise TypeError(
                f"the optimizer's update of the parameter {path_text(path)} has shape {jnp.shape(update)}, but the "
                f"parameter has {param.shape}. An optimizer that takes the gradients of single examples, such as "
                "optax.contrib.dpsgd, cannot be used: a step has the gradients of the whole batch."
            )


@dataclass(frozen=True, kw_only=True)
class Update:
    """The part of a step that changes the state: it uses the summed gradients."""

    tx: optax.GradientTransformation
    loss_scale: DynamicLossScale | float | None = None  # with one, gradients that are not finite skip the step
    gradient_dtype: Any = None  # the type in which gradients are summed over the microbatches; None: their own type
    ema_decay: float | None = None  # of the exponential moving average of the weights; None: no average is kept
    skips_nonfinite: bool = False  # a loss or gradients that are not finite skip the step, without a loss scale too
    kept: OptimizerMemory = ON_DEVICES  # the memory of the optimizer's state between steps
    measured: StepMetrics = NO_METRICS  # the metrics of `Logging(metrics=)`

    def __post_init__(self) -> None:
        if not hasattr(self.tx, "init") or not hasattr(self.tx, "update"):
            kind, held = type(self.tx).__name__, hasattr(self.tx, "tx")
            inner = f" Pass the Optax optimizer that it holds, its `.tx`. {_ITS_STATE}" if held else ""
            raise TypeError(f"tx must be an Optax optimizer such as optax.adamw(3e-4), got {kind}.{inner}")

    def first_state(self, params: Any, model_state: Any) -> TrainState:
        """Return the state before the first step.

        The average and `opt_state` have only shapes.
        """
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=shapes_of_init(self.tx.init, params),
            model_state=model_state,
            ema=None if self.ema_decay is None else jax.eval_shape(first_average, params),
            loss_scale=self.loss_scale.start() if isinstance(self.loss_scale, DynamicLossScale) else None,
        )

    def scaled(self, loss: Any, state: TrainState) -> Any:
        """Return the loss to differentiate."""
        scale = self._scale(state)
        return loss if scale is None else loss * scale

    def summand(self, grads: Any) -> Any:
        """Convert one microbatch's gradients to the type of the sum."""
        return optax.tree_utils.tree_cast(grads, self.gradient_dtype)

    def apply(
        self,
        state: TrainState,
        grads: Any,
        loss: Any,
        divisor: Any,
        model_state: Any,
        *,
        written: Any = None,
        after: AfterOptimizer | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Return the new state and its metrics.

        Args:
          state: the state before the step.
          grads: the gradients, summed over the microbatches, before the division by `divisor`.
          loss: the loss of the whole batch, for optimizers that ask for `value`.
          divisor: the number that makes sums means.
          model_state: the rest of the model's state after the loop.
          written: the parameters that the optimizer updates, if the model's call has written some of them.
          after: changes the new parameters and the model's state once more, before they enter the average.
        """
        scale = self._scale(state)
        grads = self._means(grads, state.params, divisor, scale)
        state = replace(state, opt_state=fetched(state.opt_state))
        begun = state if written is None else replace(state, params=written)
        updates, opt_state = self.updates(grads, begun, loss)
        params = optax.apply_updates(begun.params, updates)
        metrics: dict[str, Any] = {}
        finite: Any = None
        skips = scale is not None or self.skips_nonfinite
        if skips:
            finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
            if scale is None:
                finite &= jnp.isfinite(loss)
            metrics = {"skipped_step": 1.0 - finite.astype(jnp.float32)}
            if scale is not None:
                metrics["loss_scale"] = jnp.float32(scale)
        metrics |= self.measured.of(state.step, grads, begun.params, updates, opt_state, finite=finite)
        if after is not None:
            params, model_state = after(params, model_state, metrics)
        if skips:
            opt_state = _chosen(finite, opt_state, state.opt_state)
            params = _chosen(finite, params, state.params)
            model_state = _chosen(finite, model_state, state.model_state)
        ema = state.ema
        if self.ema_decay is not None:
            # In the average's type: in bfloat16, a change of a thousandth would be rounded away.
            ema = optax.incremental_update(first_average(params), ema, 1.0 - self.ema_decay)
            if skips:
                ema = jax.tree.map(lambda a, b: jnp.where(finite, a, b), ema, state.ema)
        grown = state.loss_scale
        if isinstance(self.loss_scale, DynamicLossScale):
            grown = self.loss_scale.after(state.loss_scale, finite)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=put_back(opt_state, self.kept),
            model_state=model_state,
            ema=ema,
            loss_scale=grown,
        )
        return new, metrics

    def _means(self, grads: Any, params: Any, divisor: Any, scale: Any) -> Any:
        """Return the gradients of the whole batch, without a loss scale, in the parameters' types."""
        total = divisor if scale is None else divisor * scale

        def mean(grad: Any, param: Any) -> Any:
            wide = grad.astype(jnp.promote_types(grad.dtype, param.dtype))
            return (wide / jnp.asarray(total, wide.dtype)).astype(param.dtype)

        if scale is not None and self._narrow(grads, params):
            # The product of scale and divisor may overflow a narrow type, even if neither factor overflows.
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jax.tree.map(mean, grads, params)

    def updates(self, grads: Any, state: TrainState, loss: Any) -> tuple[Any, Any]:
        """Return the optimizer's updates and its new state.

        If the optimizer needs more than gradients, parameters and the loss, its own error gets a note.
        """
        try:
            updates, opt_state = self._call(grads, state, {"value": loss} if _takes_value(self.tx) else {})
        except (TypeError, ValueError) as error:
            if any(words in str(error) for words in _LACKS_AN_ARGUMENT):
                error.add_note(_STEP_HAS)
            raise
        _check_shapes(updates, state.params)
        return updates, opt_state

    def _call(self, grads: Any, state: TrainState, more: dict[str, Any]) -> tuple[Any, Any]:
        """Call the optimizer. A chain takes any argument, but a part of it, such as `optax.contrib.sam`, may not."""
        try:
            return self.tx.update(grads, state.opt_state, state.params, **more)
        except TypeError as error:
            if not more or "unexpected keyword argument 'value'" not in str(error):
                raise
        return self.tx.update(grads, state.opt_state, state.params)

    def _scale(self, state: TrainState) -> Any:
        return state.loss_scale["scale"] if isinstance(self.loss_scale, DynamicLossScale) else self.loss_scale

    @staticmethod
    def _narrow(grads: Any, params: Any) -> bool:
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
        return any(jnp.finfo(jnp.promote_types(g.dtype, p.dtype)).bits < 32 for g, p in pairs)


def trace_update(update: Update, state: TrainState) -> TracedUpdate:
    """Trace the optimizer's update of a state, which may be shapes.

    Example:
      >>> import optax
      >>> update = Update(tx=optax.sgd(0.1, momentum=0.9))
      >>> trace_update(update, update.first_state({"w": jnp.ones(2)}, {})).parameters  # gradient, moment, weight, loss
      (1, 1, 1, None)
    """
    shapes = shapes_of(state)
    numbered = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
    places = dict(jax.tree_util.tree_leaves_with_path(numbered.params))
    kept = [parameter_of(path, places) for path, _ in jax.tree_util.tree_leaves_with_path(shapes.opt_state)]

    def updated(grads: Any, opt_state: Any, params: Any, loss: Any) -> Any:
        return update.updates(grads, replace(shapes, params=params, opt_state=opt_state), loss)

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    jaxpr = jax.make_jaxpr(updated)(shapes.params, shapes.opt_state, shapes.params, loss)
    of_kept = [None if path is None else places[path] for path in kept]
    return TracedUpdate(jaxpr, (*places.values(), *of_kept, *places.values(), None))
