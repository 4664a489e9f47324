"""The end of a step as one writes it with Optax: mean gradients, update, loss scale, skipped steps, moving average."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpp_flax.trainers import DynamicLossScale, Precision, Training, TrainState

__all__ = ["PlainUpdate"]

Hook = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Takes parameters, the rest of the model and metrics; returns the first two, changed."""


@dataclass(frozen=True, kw_only=True)
class PlainUpdate:
    """The optimizer and the options of a training; they say what a step does with its gradients."""

    tx: optax.GradientTransformation
    training: Training
    precision: Precision

    def scale(self, state: TrainState) -> Any:
        """Return the number by which the loss is multiplied before it is differentiated; None: it is not."""
        scale = self.precision.scale
        return state.loss_scale["scale"] if isinstance(scale, DynamicLossScale) else scale

    def apply(
        self, state: TrainState, params: Any, rest: Any, grads: Any, metrics: dict[str, Any], hook: Hook | None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Return the state after a step and all its metrics.

        Args:
          state: the state before the step.
          params, rest: the model's variables after its calls.
          grads: the mean gradients, without the loss scale.
          metrics: those of the loss.
          hook: what changes the model after the optimizer.
        """
        updates, opt_state = self._updates(grads, state.opt_state, params, metrics["loss"])
        new, metrics = optax.apply_updates(params, updates), dict(metrics)
        scale, size = self.scale(state), _norm(params)
        finite = jnp.bool_(True)
        if scale is not None or self.training.rule(scaled=scale is not None) == "skip":
            finite = jnp.stack([jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]).all()
            finite &= True if scale is not None else jnp.isfinite(metrics["loss"])
            metrics["skipped_step"] = 1 - finite.astype(jnp.float32)
        if scale is not None:
            metrics["loss_scale"] = jnp.float32(scale)
        metrics |= {"gradient_norm": _norm(grads), "parameter_norm": size}
        metrics["update_ratio"] = jnp.where(finite, _norm(updates) / jnp.where(size == 0, 1, size), 0)
        if hook is not None:
            new, rest = hook(new, rest, metrics)
        ema, decay = state.ema, self.training.ema_decay
        if decay is not None:
            ema = jax.tree.map(lambda mean, of: decay * mean + (1 - decay) * of.astype(mean.dtype), ema, new)
        after = replace(state, params=new, model_state=rest, opt_state=opt_state, ema=ema)
        after = jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), after, state)
        return replace(after, step=state.step + 1, loss_scale=self._next_scale(state, finite)), metrics

    def _updates(self, grads: Any, opt_state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        """Call the optimizer; one that takes the loss gets it."""
        try:
            tx = optax.with_extra_args_support(self.tx)
            return tx.update(grads, opt_state, params, value=loss)
        except TypeError as error:  # a part of a chain that takes nothing more
            if "'value'" not in str(error):
                raise
        return self.tx.update(grads, opt_state, params)

    def _next_scale(self, state: TrainState, finite: Any) -> Any:
        """Return the state of a dynamic scale: smaller after an overflow, larger after many steps without one."""
        rule = self.precision.scale
        if not isinstance(rule, DynamicLossScale):
            return state.loss_scale
        scale, good = state.loss_scale["scale"], jnp.where(finite, state.loss_scale["good_steps"] + 1, 0)
        grown = jnp.where(jnp.isfinite(scale * rule.factor), scale * rule.factor, scale)
        shrunk = jnp.maximum(scale / rule.factor, jnp.finfo(jnp.float32).tiny)
        is_due = good >= rule.growth_interval
        next_scale = jnp.where(finite, jnp.where(is_due, grown, scale), shrunk)
        return {"scale": next_scale, "good_steps": jnp.where(is_due, 0, good)}


def _norm(tree: Any) -> Any:
    leaves = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in leaves))
