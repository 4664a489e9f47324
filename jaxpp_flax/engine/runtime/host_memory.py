"""Copies between the device memory and the host memory of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Sharding, SingleDeviceSharding

__all__ = ["to_memory"]


def to_memory(arrays: Sequence[jax.Array], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Copy arrays into the memories of their shardings, which differ from their own in nothing else; do not wait.

    If several processes own a rank, each copies its own shards.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> host = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec(), memory_kind="pinned_host")
      >>> to_memory([jax.numpy.ones(2)], [host])[0].sharding.memory_kind
      'pinned_host'
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(list(arrays), list(shardings))
    return [_shards_to_memory(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]


def _shards_to_memory(array: jax.Array, sharding: Sharding) -> jax.Array:
    shards = [shard.data for shard in array.addressable_shards]
    targets = [
        SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind) for shard in array.addressable_shards
    ]
    copies = jax.device_put(shards, targets)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, copies, dtype=array.dtype)
