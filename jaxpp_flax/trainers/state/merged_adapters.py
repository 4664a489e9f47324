"""The leaves of a plain model, made of an adapted one's when they are written: each kernel on its own ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.layers.lora import Adapter, merged_part
from jaxpp_flax.pretrained.exporting import Leaf, written_parts
from jaxpp_flax.pretrained.slices import Index
from jaxpp_flax.trainers.state.placement import put_on_ranks

__all__ = ["merge_leaves"]


def merge_leaves(leaves: Mapping[str, Any], adapters: Sequence[Adapter], mesh: MpmdMesh | None) -> dict[str, Any]:
    """Return the leaves of the plain model, as `merge_lora` makes them; every process must call this.

    An adapted kernel is a `Leaf`: its parts are merged when they are written, each on the device that holds it. Factors
    that lie on other ranks than their kernel, as before the first step, are copied there.

    Args:
      leaves: of the adapted model by path.
      adapters: of the model; see `find_adapters`.
      mesh: of the ranks; None without a pipeline.
    """
    factors = {adapter.kernel: tuple(leaves[path] for path in adapter.factors) for adapter in adapters}
    if mesh is not None:
        ranks = {path: leaves[path].sharding.ranks[:1] for path in factors if isinstance(leaves[path], MpmdArray)}
        places = {path: (MpmdSharding(mesh, ranks[path], PartitionSpec()),) * 2 for path in ranks}
        factors |= put_on_ranks(mesh, {path: factors[path] for path in places}, places, donate=False)
    gone = {path for adapter in adapters for path in adapter.factors}
    plain = {path: leaf for path, leaf in leaves.items() if path not in gone}
    for adapter in adapters:
        kernel = plain[adapter.kernel]
        parts = partial(_merged_parts, kernel, factors[adapter.kernel], adapter.scale)
        plain[adapter.kernel] = Leaf(tuple(kernel.shape), kernel.dtype, parts)
    return plain


def _merged_parts(kernel: Any, factors: Sequence[Any], scale: float) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield what this process writes of a kernel with its adapter."""
    for index, piece in written_parts(kernel):
        array = jnp.asarray(piece)
        (device,) = array.devices()
        with context_mesh(None):  # JAX would compare the device with the devices of a context mesh
            there = [_on_device(factor, device) for factor in factors]
            yield index, np.asarray(merged_part(array, index, kernel.shape, there, scale))


def _on_device(factor: Any, device: Any) -> jax.Array:
    if isinstance(factor, MpmdArray):
        (array,) = factor._partially_addressable_arrays.values()  # pyright: ignore[reportPrivateUsage]
        return next(shard.data for shard in array.addressable_shards if shard.device == device)
    return jax.device_put(factor, device)
