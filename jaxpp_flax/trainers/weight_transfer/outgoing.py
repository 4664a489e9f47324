"""What leaves the trainer: leaves, or the tensors that a map makes of them, each made on the devices of its stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.reshard import spmd_to_mpmd_reshard
from jaxpp_flax.pretrained.name_map import NameMap, Rule
from jaxpp_flax.trainers.state.merged_adapters import MergedKernel
from jaxpp_flax.trainers.state.placement import on_shards

__all__ = ["Outgoing", "outgoing_leaves", "tensors_of"]


@dataclass(frozen=True)
class Outgoing:
    """An array to send: its type, and the call that makes it on the trainer's devices when it is its turn."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], Any]

    def cast(self, dtype: Any) -> Outgoing:
        """Return the same array in another type; the devices of its stage convert it."""
        if dtype == self.dtype:
            return self
        return Outgoing(
            self.shape,
            np.dtype(dtype),
            lambda: on_shards(self.make(), lambda part, _: part.astype(dtype), self.shape, np.dtype(dtype)),
        )


def outgoing_leaves(shapes: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Outgoing]:
    """Return the leaves of a model to send. `values` need not have them yet; a `MergedKernel` there is merged in turn.

    Args:
      shapes: arrays or shapes by path.
      values: where each leaf is found when it is its turn.
    """

    def one(path: str, of: Any) -> Outgoing:
        def make() -> Any:
            leaf = values[path]
            return leaf.make() if isinstance(leaf, MergedKernel) else leaf

        return Outgoing(tuple(of.shape), np.dtype(of.dtype), make)

    return {path: one(path, of) for path, of in shapes.items()}


def tensors_of(leaves: Mapping[str, Outgoing], map: NameMap) -> tuple[dict[str, Outgoing], list[str]]:
    """Return the tensors that a map makes of leaves, by name, and a line for each leaf that does not fit the map.

    Example:
      >>> import jax.numpy as jnp
      >>> leaves = {"q/kernel": jnp.arange(6).reshape(2, 3)}
      >>> map = NameMap((Rule("*/kernel", "*.weight", transpose=(1, 0)),))
      >>> tensors, _ = tensors_of(outgoing_leaves(leaves, leaves), map)
      >>> tensors["q.weight"].shape, tensors["q.weight"].make().tolist()
      ((3, 2), [[0, 3], [1, 4], [2, 5]])
    """
    fills, faults = map.resolve({path: leaf.shape for path, leaf in leaves.items()})
    found = {
        name: _tensor(leaves[fill.leaf], fill.rule, number)
        for fill in fills
        for number, name in enumerate(fill.tensors)
    }
    return found, faults


def _tensor(leaf: Outgoing, rule: Rule, number: int) -> Outgoing:
    """Return one tensor of a leaf, arranged as in a file; `number` counts the layers of a stack."""
    shape = rule.tensor_shape(leaf.shape)
    groups = rule.grouped(rule.before_transpose(range(len(leaf.shape))))
    # A part of a dimension of the tensor is a part of the first of the leaf's dimensions, with all of the others.
    whole = {dim for group in groups for dim in group[1:]} | ({rule.stack} if rule.stack is not None else set())

    def arranged(part: jax.Array, _: Any) -> jax.Array:
        sizes = [math.prod(part.shape[dim] for dim in group) for group in groups]
        if rule.stack is not None:
            part = lax.dynamic_index_in_dim(part, number, rule.stack, keepdims=False)
        if rule.transpose is not None:
            part = part.transpose(np.argsort(rule.transpose))
        return part.reshape(sizes)

    def make() -> Any:
        value = _with_whole(leaf.make(), whole)
        if not isinstance(value, MpmdArray):
            return on_shards(value, arranged, shape, leaf.dtype)
        axes = _axes(value)
        spec = PartitionSpec(*(axes[group[0]] if group else None for group in groups))
        return on_shards(value, arranged, shape, leaf.dtype, spec)

    return Outgoing(shape, leaf.dtype, make)


def _with_whole(leaf: Any, dims: Collection[int]) -> Any:
    """Return the leaf with these dimensions in one piece, on the same ranks."""
    if not isinstance(leaf, MpmdArray) or not any(_axes(leaf)[dim] for dim in dims):
        return leaf
    spec = PartitionSpec(*(None if dim in dims else axis for dim, axis in enumerate(_axes(leaf))))
    there = type(leaf.sharding)(leaf.sharding.mpmd_mesh, leaf.sharding.ranks, spec)
    return spmd_to_mpmd_reshard(leaf.sharding.mpmd_mesh, leaf, there, donate=False)


def _axes(leaf: MpmdArray) -> list[Any]:
    """Return the mesh axes that divide each dimension."""
    return [*leaf.spec, *[None] * (leaf.ndim - len(leaf.spec))]
