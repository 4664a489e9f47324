"""What Orbax is shown of an array in a run of several processes: the shards that this process writes, if any.

Stock Orbax refuses an array that one process owns, and cannot look at one of which none is here.
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

# The replica of the shard that stands for other processes' shards. Orbax writes only the first replicas.
_NEVER_WRITTEN = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ShardsOf:
    """An array as far as Orbax's handler reads it to write it. It is no `jax.Array`, so Orbax asks nothing of others.

    Args:
      shape, dtype, sharding: of the whole array, the same in every process.
      addressable_shards: this process's, or one without data where it has none.
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
        """Bytes of the whole."""
        return self.size * self.itemsize


@dataclass(frozen=True, kw_only=True)
class _NoData:
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class _NoShard:
    """Says which shape shards have, since all processes have to come to the same chunks on disk."""

    index: tuple[slice, ...]
    data: _NoData
    replica_id: int = _NEVER_WRITTEN


def shards_of(array: jax.Array) -> ShardsOf:
    """What this process writes of an array.

    An array that each process holds by itself (it is all here, and no `MpmdArray`) is written by process 0, as NumPy
    arrays and numbers are.

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
    """Whether some of its devices are this process's."""
    return any(device.process_index == jax.process_index() for device in sharding.device_set)
