"""The leaves of a plain model, made of an adapted one's when they leave the trainer: each kernel on its own ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.layers.lora import Adapter, merged_part
from jaxpp_flax.trainers.state.placement import on_shards, put_on_ranks

__all__ = ["MergedKernel", "merge_leaves"]


@dataclass(frozen=True)
class MergedKernel:
    """A kernel with its adapter, on one rank; each device that holds a part of the kernel merges this part."""

    kernel: Any
    factors: Sequence[Any]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return tuple(self.kernel.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the kernel."""
        return self.kernel.dtype

    def make(self) -> Any:
        """Return the sum, an array where the kernel is: of a kernel on several ranks, on the first one."""

        def merged(piece: jax.Array, index: tuple[slice, ...]) -> jax.Array:
            (device,) = piece.devices()
            there = [_on_device(factor, device) for factor in self.factors]
            return merged_part(piece, index, self.shape, there, self.scale)

        with context_mesh(None):  # JAX would compare the device with the devices of a context mesh
            return on_shards(_on_first_rank(self.kernel), merged, self.shape, self.dtype)


def merge_leaves(leaves: Mapping[str, Any], adapters: Sequence[Adapter], mesh: MpmdMesh | None) -> dict[str, Any]:
    """Return the leaves of the plain model, as `merge_lora` makes them; every process must call this.

    An adapted kernel is a `MergedKernel`, which is merged when it is its turn. Factors that lie on other ranks than
    their kernel, as before the first step, are copied there.

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
        plain[adapter.kernel] = MergedKernel(plain[adapter.kernel], factors[adapter.kernel], adapter.scale)
    return plain


def _on_first_rank(leaf: Any) -> Any:
    if not isinstance(leaf, MpmdArray):
        return jnp.asarray(leaf)
    first, held = leaf.sharding.ranks[0], leaf._partially_addressable_arrays  # pyright: ignore[reportPrivateUsage]
    parts = {first: held[first]} if first in held else {}
    return MpmdArray(parts, leaf.sharding.on_ranks({first}), shape=leaf.shape, dtype=leaf.dtype)


def _on_device(factor: Any, device: Any) -> jax.Array:
    if isinstance(factor, MpmdArray):
        (array,) = factor._partially_addressable_arrays.values()  # pyright: ignore[reportPrivateUsage]
        return next(shard.data for shard in array.addressable_shards if shard.device == device)
    return jax.device_put(factor, device)
