"""A restore of some leaves into a state that is not placed yet: the other leaves are made or copied afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.optimizer_state import make_on_ranks
from jaxpp_flax.trainers.state.placement import put_on_ranks
from jaxpp_flax.trainers.state.train_state import TrainState, first_average, is_abstract, model_part, shapes_of

__all__ = ["Later", "complete", "target_with_the_rest_later"]


@dataclass(frozen=True, kw_only=True)
class Later:
    """A leaf of a target that is no array on the ranks: if it is not restored, it is placed or made afterwards."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: MpmdSharding
    value: Any = None  # the user's array; None: the leaf is to be made


def target_with_the_rest_later(held: StateHolder) -> TrainState:
    """Return the target of a restore that keeps some leaves; nothing is made or copied for it.

    Without a mesh, everything is on one device, and all values are made now.
    """
    target = held.target()
    if not any(isinstance(leaf.sharding, MpmdSharding) for leaf in jax.tree.leaves(target)):
        return held.whole()

    def one(leaf: Any, place: jax.ShapeDtypeStruct) -> Any:
        if isinstance(leaf, MpmdArray):
            return leaf
        value = None if is_abstract(leaf) else leaf
        return Later(shape=place.shape, dtype=place.dtype, sharding=place.sharding, value=value)  # type: ignore[arg-type]

    return jax.tree.map(one, held.memory, target)


def complete(state: TrainState, held: StateHolder, init: Callable[[Any], Any]) -> TrainState:
    """Replace each `Later` by an array on its ranks; every process must call this.

    An optimizer's state or an average of which nothing was restored is left as shapes: it is made of the parameters
    when it is needed.

    Args:
      state: the restored target.
      held: what it was the target of.
      init: makes the optimizer's state from parameters.
    """
    later = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, Later)]
    if not later:
        return state
    mesh = later[0].sharding.mpmd_mesh
    held.compare(mesh)
    state = _with_values(mesh, state)
    leaves, structure = flatten(model_part(state.params, state.model_state))
    unmade = {path: leaf.sharding for path, leaf in leaves.items() if isinstance(leaf, Later)}
    made = held.make_model_leaves(unmade, unmade) if unmade else {}
    state = replace(state, **jax.tree.unflatten(structure, (leaves | made).values()))
    opt_state = _made(init, state.params, state.opt_state)
    ema = _made(first_average, state.params, state.ema)
    return replace(state, opt_state=opt_state, ema=ema)


def _with_values(mesh: MpmdMesh, state: TrainState) -> TrainState:
    """Place the leaves that have values."""
    leaves, structure = jax.tree.flatten(state)
    found = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Later) and leaf.value is not None}
    placed = put_on_ranks(
        mesh, {i: leaf.value for i, leaf in found.items()}, {i: leaf.sharding for i, leaf in found.items()}
    )
    return jax.tree.unflatten(structure, [placed.get(i, leaf) for i, leaf in enumerate(leaves)])


def _made(function: Callable[[Any], Any], params: Any, tree: Any) -> Any:
    """Return a tree with the leaves of `function(params)` where nothing was restored."""
    leaves, structure = jax.tree.flatten(tree)
    missing = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Later)]
    if len(missing) == len(leaves):
        return shapes_of(tree)
    made = make_on_ranks(
        lambda params: [jax.tree.leaves(function(params))[i] for i in missing],
        params,
        [leaves[i].sharding for i in missing],
    )
    known = dict(zip(missing, made, strict=True))
    return jax.tree.unflatten(structure, [known.get(i, leaf) for i, leaf in enumerate(leaves)])
