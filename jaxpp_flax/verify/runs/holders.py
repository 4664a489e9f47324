"""Which device holds an array of a pipeline, and how the array comes to the process of another device."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.reshard import mpmd_to_spmd_reshard
from jaxpp_flax.verify.rounding import on_host

__all__ = ["holder_of", "to_host"]


def holder_of(array: Any) -> Any:
    """Return the first device of the first rank that holds an array; the default device for others than ranks'."""
    if not isinstance(array, MpmdArray):
        return jax.local_devices()[0]
    return array.sharding.mpmd_mesh.rank_devices(min(array.mpmd_idxs))[0]


def to_host(array: Any, device: Any) -> Any:
    """Return the whole array on the host of a device's process; None in others. All processes call this together."""
    is_here = device.process_index == jax.process_index()
    if isinstance(array, MpmdArray) and array.sharding.mpmd_mesh.jax_mesh.is_multi_process:
        mesh = array.sharding.mpmd_mesh
        array = mpmd_to_spmd_reshard(mesh, array, SingleDeviceSharding(device), donate=False)
    return on_host(array) if is_here else None
