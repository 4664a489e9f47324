"""The weights that inference and export use: the trained ones, or those that a function makes of the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.optimizer_memory import fetched
from jaxpp_flax.trainers.state.train_state import TrainState, shapes_of

__all__ = ["InferenceWeights", "average_of"]


def average_of(state: TrainState) -> Any:
    """Return the moving average: `Inference(params=lambda state: state.ema)`."""
    return state.ema


class InferenceWeights:
    """Makes the weights for `evaluate`, `predict`, `generate` and `export_pretrained`, and tells once which they are.

    Args:
      function: `Inference(params=)`: the weights of a `TrainState`, like its `params`. None: the trained ones.
      tell: prints a line.

    Raises:
      ValueError: if the function's result does not have the paths and shapes of the parameters.
    """

    def __init__(
        self, held: StateHolder, function: Callable[[TrainState], Any] | None, tell: Callable[[str], None]
    ) -> None:
        self.held, self._function, self._tell = held, function, tell
        self._has_told = False
        self._programs: dict[Callable[[TrainState], Any], LeafPrograms] = {}
        if function is not None:
            jax.eval_shape(lambda state: weights_of(state, function), held.memory)

    def for_inference(self) -> TrainState:
        """Return the part of the state that inference reads. It is made anew in each call: a copy for a short time."""
        self._tell_once()
        return self.of(self._function).for_inference()

    def for_export(self, *, average: bool) -> TrainState:
        """Return the state with the weights to write: the moving average, or those of inference."""
        if average:
            self._tell("export_pretrained writes the moving average of the weights")
            return self.of(average_of)
        self._tell_once()
        return self.of(self._function)

    def of(self, function: Callable[[TrainState], Any] | None) -> TrainState:
        """Return the state with the weights that `function` makes of it, in the types and places of the parameters."""
        if function is None:
            return self.held.weights()
        state = self.held.whole()
        if function not in self._programs:
            made = lambda state: weights_of(replace(state, opt_state=fetched(state.opt_state)), function)  # noqa: E731
            self._programs[function] = LeafPrograms.trace(made, self.held.kept.traced(shapes_of(state)))
        params, structure = flatten(state.params)
        found = self._programs[function].compute(state, {path: leaf.sharding for path, leaf in params.items()})
        return replace(state, params=jax.tree.unflatten(structure, [found[path] for path in params]))

    def _tell_once(self) -> None:
        """Say which weights are used, if there are others."""
        if self._has_told:
            return
        self._has_told, state = True, self.held.memory
        if self._function is not None:
            name = getattr(self._function, "__name__", "").replace("<lambda>", "") or "..."
            self._tell(f"inference and export use the weights of Inference(params={name})")
        elif state.ema is not None:
            self._tell(
                "inference and export use the trained weights, not their moving average: "
                "Inference(params=lambda state: state.ema)"
            )
        elif any(map(_is_schedule_free, jax.tree.leaves(state.opt_state, is_leaf=_is_schedule_free))):
            self._tell(
                "inference and export use the trained weights, not those that schedule_free evaluates: Inference("
                "params=lambda state: optax.contrib.schedule_free_eval_params(state.opt_state, state.params))"
            )


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
