"""The weights that inference and export use: the trained ones, or those that a function makes of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["average_of", "weights_of", "which_weights"]


def average_of(state: TrainState) -> Any:
    """Return the moving average: `Inference(params=lambda state: state.ema)`."""
    return state.ema


def which_weights(state: TrainState, function: Callable[[TrainState], Any] | None) -> str | None:
    """Return the line that says which weights inference uses, if the state has others; else None."""
    if function is not None:
        name = getattr(function, "__name__", "").replace("<lambda>", "") or "..."
        return f"inference and export use the weights of Inference(params={name})"
    if state.ema is not None:
        return (
            "inference and export use the trained weights, not their moving average: "
            "Inference(params=lambda state: state.ema)"
        )
    if any(map(_is_schedule_free, jax.tree.leaves(state.opt_state, is_leaf=_is_schedule_free))):
        return (
            "inference and export use the trained weights, not those that schedule_free evaluates: Inference("
            "params=lambda state: optax.contrib.schedule_free_eval_params(state.opt_state, state.params))"
        )
    return None


def weights_of(state: TrainState, function: Callable[[TrainState], Any]) -> Any:
    """Return the function's weights, in the parameters' types.

    Example:
      >>> state = TrainState(step=jnp.int32(4), params={"w": jnp.ones(2)}, opt_state=(), model_state={})
      >>> weights_of(state, lambda state: jax.tree.map(lambda w: w / state.step, state.params))
      {'w': Array([0.25, 0.25], dtype=float32)}
      >>> weights_of(state, lambda state: {"v": jnp.ones(2)})
      Traceback (most recent call last):
      ValueError: Inference(params=) must return a tree like state.params, and these leaves differ: v, w. ...
    """
    made = function(state)
    if made is None:
        without = "" if state.ema is not None else " state.ema is None without training=Training(ema_decay=0.999)."
        raise ValueError(f"Inference(params=) returned None. Return a tree like state.params.{without}")
    wanted, structure = flatten(state.params)
    found = {path: jnp.asarray(leaf) for path, leaf in flatten(made)[0].items()}
    shapes, found_shapes = ({path: leaf.shape for path, leaf in tree.items()} for tree in (wanted, found))
    wrong = sorted(path for path in wanted.keys() | found.keys() if shapes.get(path) != found_shapes.get(path))
    if wrong:
        raise ValueError(
            "Inference(params=) must return a tree like state.params, and these leaves differ: "
            f"{listed(wrong, 3, str)}. Return the same paths with the same shapes; types are converted."
        )
    return jax.tree.unflatten(structure, [found[path].astype(leaf.dtype) for path, leaf in wanted.items()])


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)
