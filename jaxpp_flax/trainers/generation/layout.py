"""The places of a generation's arrays: each cache leaf is made on the devices of its stage, and never elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.messages import amount
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.generation.decoding import DecodingModel
from jaxpp_flax.trainers.mesh import batch_spec

__all__ = ["Layout", "layout_specs"]


def layout_specs(mesh: MpmdMesh | None, cache: Any, doubled: Any, progress: Any, fixed: Any) -> tuple[Any, Any, Any]:
    """Return the specs of `(carried, tokens, fixed)` on a rank: sequences are divided like the examples of a batch.

    Args:
      mesh: the mesh; None gives no specs.
      cache, doubled: the shapes of the cache, and those with twice the sequences: their difference tells which
        dimension of a leaf counts the sequences.
      progress, fixed: as the steps take them.
    """
    if mesh is None:
        return None, None, None
    axes = tuple(batch_spec(mesh, 2))[1:]

    def divided(leaf: Any, dimension: int | None) -> PartitionSpec:
        return PartitionSpec() if dimension is None or not axes else PartitionSpec(*[None] * dimension, *axes)

    def of_cache(leaf: Any, twice: Any) -> PartitionSpec:
        pairs = zip(leaf.shape, twice.shape, strict=True)
        return divided(leaf, next((i for i, (one, two) in enumerate(pairs) if one != two), None))

    def of_rows(leaf: Any) -> PartitionSpec:
        return divided(leaf, 0 if leaf.ndim else None)

    return (
        (jax.tree.map(of_cache, cache, doubled), jax.tree.map(of_rows, progress)),
        PartitionSpec(*axes),
        jax.tree.map(of_rows, fixed),
    )


@dataclass(frozen=True, eq=False)
class Layout:
    """Makes and places the arrays of a group for a compiled step; `mesh` None stands for the default device."""

    compiled: Any
    model: DecodingModel
    mesh: MpmdMesh | None

    def carried(self, progress: Any) -> Any:
        """Return the cache and the progress of a group before its first call."""
        if self.mesh is None:
            return self._make_cache(), _copies(progress)
        return self._make_cache(), jax.tree.map(place_on_ranks, progress, self.compiled.in_shardings[0][1][1])

    @cached_property
    def _make_cache(self) -> Callable[[], Any]:
        """Makes a cache, each leaf on its ranks; compiled once for all groups."""
        if self.mesh is None:
            return jax.jit(self.model.make_cache)
        shardings, tree = jax.tree.flatten(self.compiled.in_shardings[0][1][0])
        shapes = jax.tree.leaves(self.model.cache)
        makers = {rank: self._maker(rank, shardings) for rank in self.mesh.local_ranks}

        @context_mesh(None)  # with a context mesh, JAX would compare each rank's devices with its devices
        def make() -> Any:
            parts: list[dict[int, jax.Array]] = [{} for _ in shapes]
            for rank, (mine, maker) in makers.items():
                for i, array in zip(mine, maker(), strict=True):
                    parts[i][rank] = array
            arrays = zip(parts, shardings, shapes, strict=True)
            return jax.tree.unflatten(tree, [MpmdArray(of, s, shape=x.shape, dtype=x.dtype) for of, s, x in arrays])

        return make

    def _maker(self, rank: int, shardings: Sequence[MpmdSharding]) -> tuple[list[int], Callable[[], list[jax.Array]]]:
        """Return the leaves of a rank, and a function that makes these alone."""
        mine = [i for i, sharding in enumerate(shardings) if rank in sharding.ranks]

        def make() -> list[jax.Array]:
            leaves = jax.tree.leaves(self.model.make_cache())
            return [leaves[i] for i in mine]

        return mine, jax.jit(make, out_shardings=[shardings[i].local_sharding(rank) for i in mine])

    def fixed(self, values: Any) -> Any:
        """Return the values that a group's steps read and do not change."""
        if self.mesh is None:
            return _copies(values)
        return jax.tree.map(place_on_ranks, values, self.compiled.in_shardings[0][3])

    def check_fits(self, num_groups: int) -> None:
        """Refuse caches that do not fit, before one is made.

        Raises:
          ModelError: the message names a device and its share.
        """
        needed: dict[Any, int] = {}
        leaves = jax.tree.leaves(self.model.cache)
        if self.mesh is None:
            needed[jax.local_devices()[0]] = sum(_nbytes(leaf.shape, leaf) for leaf in leaves) * num_groups
            leaves = []
        shardings = jax.tree.leaves(self.compiled.in_shardings[0][1][0]) if leaves else []
        for leaf, sharding in zip(leaves, shardings, strict=True):
            for rank in sharding.ranks:
                local = sharding.local_sharding(rank)
                share = _nbytes(local.shard_shape(leaf.shape), leaf) * num_groups
                for device in local.device_set:
                    needed[device] = needed.get(device, 0) + share
        short = shortage(needed)
        if short is not None:
            raise ModelError(
                f"the cache of this generation does not fit: {short.device} would hold "
                f"{amount(needed[short.device], 'B')} of it, and has {amount(short.free, 'B')} free. Nothing was "
                "placed. Pass fewer prompts in one call, fewer max_new_tokens or a narrower cache_dtype, or use more "
                "stages."
            )


def _copies(tree: Any) -> Any:
    return jax.tree.map(lambda value: jnp.array(value, copy=True), tree)


def _nbytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize
