"""The conversion of one leaf: to the array that Orbax writes, and back from the array that Orbax restores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import key_impl, on_parts, place, place_on_ranks


def to_disk(leaf: Any) -> Any:
    """Convert a leaf for Orbax: to a global array; random keys to their data, uint4 to uint8."""
    if is_key(leaf):
        leaf = on_parts(leaf, jax.random.key_data)
    elif _lacks_file_type(leaf):
        leaf = on_parts(leaf, lambda x: x.astype(jnp.uint8))
    if isinstance(leaf, MpmdArray):
        return leaf.as_jax_array()
    # The save runs in the background, and the user may change a NumPy array meanwhile: copy it.
    return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic, bool)) else leaf


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of a leaf.

    Example:
      >>> abstract_leaf(np.ones((2, 3), np.float32))
      ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(leaf, "sharding", None))


@dataclass(frozen=True, kw_only=True)
class WantedLeaf:
    """The requested form of a leaf on disk. For a random key, this is the form of the key's data; of uint4, uint8."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    restore_type: Any
    finish: Callable[[Any], Any]

    @classmethod
    def of(cls, leaf: Any) -> WantedLeaf:
        """Read the request from a leaf: an array of any kind, a `jax.ShapeDtypeStruct`, or a number."""
        if isinstance(leaf, (bool, int, float, complex)):
            return cls(shape=(), dtype=None, sharding=None, restore_type=np.ndarray, finish=lambda x: type(leaf)(x))
        if isinstance(leaf, (np.ndarray, np.generic)):
            return cls(shape=leaf.shape, dtype=leaf.dtype, sharding=None, restore_type=np.ndarray, finish=np.asarray)
        sharding = leaf.sharding if leaf.sharding is not None else SingleDeviceSharding(jax.local_devices()[0])
        shape = tuple(leaf.shape)
        if _lacks_file_type(leaf):
            narrow = partial(on_parts, function=lambda x: x.astype(leaf.dtype))
            return cls(shape=shape, dtype=jnp.dtype("uint8"), sharding=sharding, restore_type=jax.Array, finish=narrow)
        if not is_key(leaf):
            return cls(shape=shape, dtype=leaf.dtype, sharding=sharding, restore_type=jax.Array, finish=lambda x: x)
        implementation, data = key_impl(leaf.dtype), _data_of_keys(leaf)

        def wrap(restored: Any) -> Any:
            if is_key(restored):  # stock Orbax saves that a leaf is a key
                return restored
            return on_parts(restored, lambda x: jax.random.wrap_key_data(x, impl=implementation))

        return cls(shape=data.shape, dtype=data.dtype, sharding=sharding, restore_type=jax.Array, finish=wrap)

    def faults(self, shape: Any, dtype: Any, may_widen: bool = False) -> list[str]:
        """List the differences from a leaf on disk with this shape and dtype, where they are known.

        With `may_widen`, the type on disk may be narrower.
        """
        found: list[str] = []
        if shape is not None and tuple(shape) != tuple(self.shape):
            found.append(f"shape {tuple(shape)} in the checkpoint, wanted {tuple(self.shape)}")
        is_other = dtype is not None and self.dtype is not None and np.dtype(dtype) != np.dtype(self.dtype)
        if is_other and not (may_widen and _holds(self.dtype, dtype)):
            found.append(f"dtype {np.dtype(dtype)} in the checkpoint, wanted {np.dtype(self.dtype)}")
        if self.sharding is not None and not found:
            try:
                self.sharding.shard_shape(tuple(self.shape))
            except ValueError as error:
                found.append(f"shape {tuple(self.shape)} does not fit the wanted sharding {self.sharding}: {error}")
        return found


def _holds(wide: Any, narrow: Any) -> bool:
    """Return True if every value of the type `narrow` is one of `wide`."""
    return jnp.promote_types(wide, narrow) == wide


def assemble(array: jax.Array, sharding: MpmdSharding) -> MpmdArray:
    """Make an `MpmdArray` from the array over all its ranks, which Orbax has restored.

    If two ranks share a device, each gets its own copy, since steps donate each rank's memory.
    """
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    parts: dict[int, jax.Array] = {}
    used: set[Any] = set()
    for rank in sharding.ranks:
        if not sharding.mpmd_mesh.is_local(rank):
            continue
        local = sharding.local_sharding(rank)
        devices = [device for device in sharding.mpmd_mesh.rank_devices(rank) if device in shards]
        pieces = [jnp.array(shards[d], copy=True) if d in used else shards[d] for d in devices]
        used.update(devices)
        parts[rank] = jax.make_array_from_single_device_arrays(array.shape, local, pieces, dtype=array.dtype)
    return MpmdArray(parts, sharding, shape=array.shape, dtype=array.dtype)


def is_empty(leaf: Any) -> bool:
    """Return True if a leaf has no elements. Orbax does not write such arrays, and nothing is lost."""
    return 0 in np.shape(leaf)


def empty(leaf: Any) -> Any:
    """Make an array without elements like `leaf`, a shape; return `leaf` itself if it is an array."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    wanted = WantedLeaf.of(leaf)
    value, sharding = np.zeros(wanted.shape, wanted.dtype), wanted.sharding
    # Neither call needs the other processes that own a part of the sharding's devices.
    made = place_on_ranks(value, sharding) if isinstance(sharding, MpmdSharding) else place(value, sharding)
    return wanted.finish(made)


def _data_of_keys(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def is_key(leaf: Any) -> bool:
    """Return True if a leaf holds random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _lacks_file_type(leaf: Any) -> bool:
    """Return True for numbers that no file of Orbax can have: TensorStore knows int4 and float4, but no uint4."""
    return getattr(leaf, "dtype", None) in (jnp.uint4, jnp.uint2)
