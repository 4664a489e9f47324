"""Place values on this process's devices of a sharding, and in its memory, without communication with other processes.

If a host value goes to devices of several processes, `jax.device_put` compares the value across them by a collective;
here each process places its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp_flax._compat import copy_arrays
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding

__all__ = ["key_impl", "on_parts", "place", "place_on_ranks", "place_parts", "to_memory"]


def place(value: Any, sharding: Sharding, *, may_alias: bool | None = None) -> jax.Array:
    """Return `value` with the given sharding; this process owns some devices of the sharding.

    Args:
      value: the same on all processes that own the sharding's devices: a host value, an array of this process, or a
        `jax.Array` over several processes that has the needed parts on this process's devices.
      sharding: the target.
      may_alias: as in `jax.device_put`: False always makes a copy.

    Raises:
      ValueError: if this process needs a part that lies in another process.
      RuntimeError: if the value has been deleted.
    """
    if isinstance(value, jax.Array) and may_alias is not False and value.sharding == sharding:
        if value.is_deleted():
            raise RuntimeError(f"an array to be placed, {value.dtype}{list(value.shape)}, has been deleted.")
        return value
    if sharding.is_fully_addressable:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = _own_part(value, sharding)
        if may_alias is not False:
            return jax.device_put(value, sharding, may_alias=may_alias)
        if not isinstance(value, jax.Array):
            if next(iter(sharding.device_set)).platform != "cpu":
                return jax.device_put(value, sharding, may_alias=False)
            # On CPU `jax.device_put` takes the memory of an aligned NumPy array, even with `may_alias=False`. The copy
            # below is made later, when the caller may have changed the array.
            value = jax.device_put(value.copy() if isinstance(value, np.ndarray) else value, sharding)
        # If `jax.device_put` repartitions, it reuses the parts that are already in place, without a copy.
        with jax.transfer_guard_device_to_device("allow"):  # it is as explicit as `jax.device_put`
            return copy_arrays([value], [sharding])[0]
    if isinstance(value, jax.Array):
        if value.sharding == sharding or value.sharding.is_equivalent_to(sharding, value.ndim):
            return value if may_alias is not False else jnp.copy(value)
        value = _own_part(value, sharding) if not value.is_fully_addressable else value
    if jnp.issubdtype(getattr(value, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        data = place(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value, jax.dtypes.canonicalize_dtype(np.result_type(value)))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


def _own_part(value: jax.Array, sharding: Sharding) -> Any:
    """Return the whole of an array of several processes, if this process has it."""
    if value.is_fully_replicated and value.addressable_shards:
        return value.addressable_shards[0].data
    raise ValueError(
        f"an argument, {value.dtype}{list(value.shape)}, is sharded over several processes as {value.sharding}, but "
        f"this step needs it as {sharding} in process {jax.process_index()}, which has not all of it. Pass it with "
        "the sharding that the step takes (`compiled.in_shardings`), or as a host array that every process has."
    )


def place_on_ranks(value: Any, sharding: MpmdSharding) -> MpmdArray:
    """Make an `MpmdArray` of a value that all processes have; each process keeps copies for its ranks.

    Example:
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jaxpp_flax import MpmdMesh
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> place_on_ranks(np.arange(3), MpmdSharding(mesh, {1}, P())).mpmd_idxs
      (1,)
    """
    local = [rank for rank in sharding.ranks if sharding.mpmd_mesh.is_local(rank)]
    parts = {rank: place(value, sharding.local_sharding(rank), may_alias=False) for rank in local}
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return MpmdArray(parts, sharding, shape=np.shape(value), dtype=dtype)


def place_parts(
    read: Callable[[tuple[slice, ...]], np.ndarray], shape: Sequence[int], dtype: Any, sharding: Sharding
) -> jax.Array | MpmdArray:
    """Make an array of the parts that this process's devices hold. Each part is read once for each rank.

    Args:
      read: returns a part, by an index with start and stop for each dimension; nothing changes the part afterwards.
      shape, dtype: of the whole array.
      sharding: the target.

    Example:
      >>> place_parts(np.arange(6).__getitem__, (6,), np.int32, SingleDeviceSharding(jax.devices()[0])).tolist()
      [0, 1, 2, 3, 4, 5]
    """
    if not isinstance(sharding, MpmdSharding):
        return _place_parts(read, tuple(shape), dtype, sharding)
    local = [rank for rank in sharding.ranks if sharding.mpmd_mesh.is_local(rank)]
    parts = {rank: _place_parts(read, tuple(shape), dtype, sharding.local_sharding(rank)) for rank in local}
    return MpmdArray(parts, sharding, shape=shape, dtype=dtype)


def _place_parts(read: Callable[..., np.ndarray], shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    """Read each part once, and put it on its devices before the next one is read."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    index_of = sharding.addressable_devices_indices_map(shape)
    for device, index in index_of.items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    pieces: dict[Any, jax.Array] = {}
    for bounds, same in devices.items():
        piece = read(tuple(slice(*ends) for ends in bounds))
        for device in same:
            own = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            # On CPU this may be the memory of `piece`, which nothing changes: XLA copies it where a step donates it.
            pieces[device] = jax.device_put(piece, own)
        jax.block_until_ready([pieces[device] for device in same])
    ordered = [pieces[device] for device in index_of]
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered, dtype=dtype)


def to_memory(arrays: Sequence[jax.Array], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Copy arrays into the memories of their shardings, which differ from their own in nothing else; do not wait.

    If several processes own a rank, each copies its own shards.

    Example:
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


def key_impl(dtype: Any) -> Any:
    """Return the name of a key dtype's generator."""
    names: list[Any] = []
    jax.eval_shape(lambda key: names.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return names[0]


def on_parts(leaf: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to an array; of an `MpmdArray`, to the part on each rank of this process.

    Example:
      >>> on_parts(jnp.arange(3), lambda part: part + 1).tolist()
      [1, 2, 3]
    """
    if not isinstance(leaf, MpmdArray):
        return function(leaf)
    parts = {rank: function(part) for rank, part in leaf._partially_addressable_arrays.items()}
    like = jax.eval_shape(function, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return MpmdArray(parts, leaf.sharding, shape=like.shape, dtype=like.dtype)
