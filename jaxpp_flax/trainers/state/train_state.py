"""The state that a training step reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All values that a training step changes: a pytree with logical paths as keys, never stages.

    Args:
      step: optimizer steps done, an int32 scalar.
      params: the trained parameters: an `nnx.State`, or a Linen tree.
      opt_state: the optimizer's state.
      model_state: the model's other variables: running statistics, frozen parameters, keys of random numbers.
      ema: the average of the trained parameters (`ema_decay=`), or None.
      loss_scale: the state of a dynamic loss scale, or None.

    Example:
      >>> import jax.numpy as jnp
      >>> state = TrainState(step=jnp.int32(0), params={"w": jnp.ones(2)}, opt_state=(), model_state={})
      >>> len(jax.tree.leaves(state))
      2
    """

    step: Any
    params: Any
    opt_state: Any
    model_state: Any
    ema: Any = None
    loss_scale: Any = None

    def for_inference(self) -> TrainState:
        """Return the part of the state that `evaluate` and `predict` read."""
        return replace(self, opt_state=(), ema=None, loss_scale=None)


def is_abstract(tree: Any) -> bool:
    """Return True if some leaf is a shape without a value."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def shapes_of(tree: Any) -> Any:
    """Return the shapes of a tree, without values or places."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def target_of(state: TrainState, shardings: TrainState) -> TrainState:
    """Return shapes with shardings."""
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), state, shardings)


def model_part(params: Any, rest: Any) -> dict[str, Any]:
    """Return the weights and the rest of a model under the names of `TrainState`."""
    return {"params": params, "model_state": rest}
