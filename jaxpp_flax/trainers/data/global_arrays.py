"""Leaves of a batch that are `jax.Array`s over several processes: cut and moved on the devices, not on the hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers.data.batch import cut_leaf
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.mesh import batch_spec, num_batch_shards

__all__ = ["cut_global", "is_global"]


def is_global(leaf: Any) -> bool:
    """Return True for a `jax.Array` of which other processes have parts."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def cut_global(leaf: jax.Array, count: int, each: int, mesh: MpmdMesh) -> Any:
    """Return a leaf of shape (batch, ...) in the step's form, on the devices of the ranks that it lies on.

    All processes that have parts of the leaf call this. A device reads one range of each microbatch, so a leaf whose
    examples are divided one range a device is exchanged between the devices.

    Raises:
      BatchError: if the leaf lies neither on all devices of the mesh nor on those of one rank.
    """
    if leaf.is_fully_replicated and leaf.addressable_shards:
        return cut_leaf(leaf.addressable_shards[0].data, count, each)
    found = _place_of(mesh, frozenset(leaf.sharding.device_set))
    if found is None:
        raise BatchError(
            f"the batch has a jax.Array over several processes, {leaf.dtype}{list(leaf.shape)}, sharded as "
            f"{leaf.sharding}. A step takes one on all devices of the trainer's mesh, or on those of one rank: make it "
            "with `NamedSharding(trainer.mesh.jax_mesh, PartitionSpec('data'))`, the axis of the examples."
        )
    where, ranks = found
    spec = PartitionSpec() if each % num_batch_shards(mesh) else batch_spec(mesh, leaf.ndim + 1)
    on_axes = jax.device_put(leaf, NamedSharding(where, PartitionSpec(*spec[1:])))
    cut = _cutting(count, NamedSharding(where, spec))(on_axes)
    sharding = MpmdSharding(mesh, set(ranks), spec)
    shards = {shard.device: shard.data for shard in cut.addressable_shards}
    parts = {
        rank: jax.make_array_from_single_device_arrays(
            cut.shape,
            sharding.local_sharding(rank),
            [shards[device] for device in mesh.rank_devices(rank) if device in shards],
        )
        for rank in ranks
        if mesh.is_local(rank)
    }
    return MpmdArray(parts, sharding, shape=cut.shape, dtype=cut.dtype)


@lru_cache
def _place_of(mesh: MpmdMesh, devices: frozenset[Any]) -> tuple[Mesh, tuple[int, ...]] | None:
    """Return a mesh of these devices, with its ranks: all of them or one. On Auto axes, JAX cuts any sharding."""
    ranks = tuple(range(mesh.mpmd_dim))
    for where, its_ranks in ((mesh.jax_mesh, ranks), *((mesh.unstack[rank], (rank,)) for rank in ranks)):
        if devices == frozenset(where.devices.flat):
            return Mesh(where.devices, where.axis_names), its_ranks
    return None


@lru_cache
def _cutting(count: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return the compiled function that cuts an array into microbatches, each divided as the step takes it."""

    def cut(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])

    return jax.jit(cut, out_shardings=sharding)
