"""Values onto the devices that this process owns of a sharding, without a word to other processes.

`jax.device_put` of a host value to devices of several processes compares the value across them, by a collective; here
each process places its own part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxpp_flax.engine.array import MpmdArray, MpmdSharding

__all__ = ["place", "place_on_ranks"]


def place(value: Any, sharding: Sharding) -> jax.Array:
    """`value` with the given sharding, of which this process owns some devices.

    Args:
      value: the same on all processes that own the sharding's devices: a host value, an array of this process, or a
        `jax.Array` over several processes that has the parts in question on this process's devices.
      sharding: where to.

    Raises:
      ValueError: if a part that is needed here lies in another process.
    """
    if sharding.is_fully_addressable:
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            return jax.device_put(value, sharding)
        return jax.device_put(_own_part(value, sharding), sharding)
    if isinstance(value, jax.Array):
        if value.sharding == sharding or value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        value = _own_part(value, sharding) if not value.is_fully_addressable else value
    if jnp.issubdtype(getattr(value, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        data = place(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value, jax.dtypes.canonicalize_dtype(np.result_type(value)))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _own_part(value: jax.Array, sharding: Sharding) -> Any:
    """The whole of an array of several processes, where this process has it."""
    if value.is_fully_replicated and value.addressable_shards:
        return value.addressable_shards[0].data
    raise ValueError(
        f"an argument, {value.dtype}{list(value.shape)}, is sharded over several processes as {value.sharding}, but "
        f"this step needs it as {sharding} in process {jax.process_index()}, which has not all of it. Pass it with "
        "the sharding that the step takes (`compiled.in_shardings`), or as a host array that every process has."
    )


def place_on_ranks(value: Any, sharding: MpmdSharding) -> MpmdArray:
    """A value that all processes have as an `MpmdArray`; each process keeps the replicas of its ranks.

    Example:
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jaxpp_flax.engine.mesh import MpmdMesh
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> place_on_ranks(np.arange(3), MpmdSharding(mesh, {1}, P())).mpmd_idxs
      (1,)
    """
    local = [rank for rank in sharding.ranks if sharding.mpmd_mesh.is_local(rank)]
    parts = {rank: place(value, sharding.local_sharding(rank)) for rank in local}
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return MpmdArray(parts, sharding, shape=np.shape(value), dtype=dtype)
