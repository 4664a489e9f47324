"""The state that a training step reads and writes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.messages import listed

# The beginnings of paths in a state that a model's own paths do not have.
_HOLDERS = ("params/", "model_state/collections/", "model_state/frozen/", "model_state/")
OF_MODEL = ("params/", "model_state/")
"""The beginnings of the paths of a model's leaves."""

# Variables that are no weights: random streams, the cache of an attention that decodes, and what a call has sown.
_NO_WEIGHTS = (nnx.RngState, nnx.Cache, nnx.Intermediate)

WIDENED = "ema/*"
"""The leaves of a state that a checkpoint may hold in a narrower type: old averages had the parameters' own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All values that a training step changes: a pytree. Its paths are those of the model and do not name stages.

    Args:
      step: the number of optimizer steps done, an int32 scalar.
      params: the trained parameters: an `nnx.State`, or a Linen tree.
      opt_state: the optimizer's state.
      model_state: the model's other variables: running statistics, frozen parameters, keys of random numbers.
      ema: the average of the trained parameters (`ema_decay=`), in float32 or wider; or None.
      loss_scale: the state of a dynamic loss scale, or None.

    Example:
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


def parameter_of(path: tuple[Any, ...], known: Container[Any]) -> tuple[Any, ...] | None:
    """Return the path of the parameter that a leaf of the optimizer belongs to: its longest end that is `known`."""
    return next((path[i:] for i in range(len(path)) if path[i:] in known), None)


def first_average(params: Any) -> Any:
    """Return the moving average before the first step: a copy of the parameters, in float32 or wider.

    Example:
      >>> first_average({"w": jnp.ones(2, jnp.bfloat16)})
      {'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: jnp.array(x, dtype=jnp.promote_types(x.dtype, jnp.float32), copy=True), params)


def is_abstract(tree: Any) -> bool:
    """Return True if some leaf is a shape without a value."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def abstract_text(lacking: Sequence[str], count: int) -> str:
    """Return the message for a model without values; `lacking` has paths, and `count` is the number of its leaves."""
    return (
        f"the model is abstract: {len(lacking)} of its {count} leaves are shapes without values "
        f"({listed([*map(own_path, lacking)], 3, str)}), and the trainer cannot initialize a module of "
        "`nnx.eval_shape`. Give it values first: trainer.restore(path), or fit(resume=True) with a checkpoint. For new "
        "values, pass the function that makes the model, `lambda rngs: GPT(config, rngs=rngs)`: each leaf is "
        "made on its ranks."
    )


def shapes_of(tree: Any) -> Any:
    """Return the shapes of a tree, without values or places."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(one, tree)


def model_part(params: Any, rest: Any) -> dict[str, Any]:
    """Return the weights and the rest of a model under the names of `TrainState`."""
    return {"params": params, "model_state": rest}


def own_path(path: str) -> str:
    """Return the model's own path of a leaf of the state.

    >>> own_path("params/head/kernel"), own_path("model_state/collections/batch_stats/mean")
    ('head/kernel', 'batch_stats/mean')
    """
    return path.removeprefix(next((holder for holder in _HOLDERS if path.startswith(holder)), ""))


def leaves_of_model(state: TrainState) -> dict[str, Any]:
    """Return the leaves of the model, by the model's own paths, without random streams and caches."""
    found = weight_leaves(model_part(state.params, state.model_state))
    return {own_path(path): leaf for path, leaf in found.items()}


def weight_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, without random streams and caches."""
    weights = jax.tree.map(
        lambda node: None if isinstance(node, _NO_WEIGHTS) else node, tree, is_leaf=lambda x: isinstance(x, _NO_WEIGHTS)
    )
    return {path: leaf for path, leaf in flatten(weights)[0].items() if not is_key(leaf)}
