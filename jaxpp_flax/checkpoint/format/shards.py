"""The form of an array for Orbax in a run of several processes: the shards that this process writes, if any.

Stock Orbax refuses an array that one process owns, and cannot handle an array without a shard in this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from jaxpp_flax.engine.arrays.mesh import MpmdSharding

__all__ = ["ShardsOf", "has_local_devices", "shards_of"]

# The replica number of a stand-in for other processes' shards. Orbax writes only the first replicas.
_NEVER_WRITTEN = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ShardsOf:
    """The parts of an array that Orbax's handler needs to write it. Not a `jax.Array`, so Orbax needs no other process.

    Args:
      shape, dtype, sharding: the values of the whole array, the same in every process.
      addressable_shards: this process's shards, or one shard without data if the process has none.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    addressable_shards: Sequence[Any]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.itemsize


@dataclass(frozen=True, kw_only=True)
class _NoData:
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class _NoShard:
    """A shard that has only a shape: all processes must compute the same chunks on disk."""

    index: tuple[slice, ...]
    data: _NoData
    replica_id: int = _NEVER_WRITTEN


def shards_of(array: jax.Array) -> ShardsOf:
    """Return the shards of an array that this process writes.

    Process 0 writes an array that each process holds as a whole (fully addressable, and not an `MpmdArray`), as it
    writes NumPy arrays and numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> [shard] = shards_of(jnp.arange(3)).addressable_shards
      >>> shard.index, shard.replica_id, shard.data.shape
      ((slice(None, None, None),), 0, (3,))
    """
    shards: Sequence[Any] = array.addressable_shards
    everywhere = array.is_fully_addressable and not isinstance(array.sharding, MpmdSharding)
    if not shards or (everywhere and jax.process_index() != 0):
        shape = array.sharding.shard_shape(array.shape)
        shards = [_NoShard(index=tuple(slice(0, size) for size in shape), data=_NoData(shape=shape))]
    return ShardsOf(shape=array.shape, dtype=array.dtype, sharding=array.sharding, addressable_shards=shards)


def has_local_devices(sharding: Any) -> bool:
    """Return True if some devices of a sharding belong to this process."""
    return any(device.process_index == jax.process_index() for device in sharding.device_set)
