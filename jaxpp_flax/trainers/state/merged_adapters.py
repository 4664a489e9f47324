"""The weights of a model without its adapters (LoRA), each sum made on the ranks of its kernel when it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import on_every_process, place_on_ranks
from jaxpp_flax.layers.lora import merged_kernel
from jaxpp_flax.pretrained.exporting import Leaf, array_leaf
from jaxpp_flax.pretrained.slices import Index

_FACTORS = ("lora_a", "lora_b")


def merged_leaves(leaves: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, Any]:
    """Return the leaves to export: no factors, and for each adapted kernel its sum with its adapter.

    Args:
      leaves: the model's weights by path.
      scales: the scale of each adapter by the path of its layer, from `adapter_scales`.
    """
    merged = dict(leaves)
    for layer, scale in scales.items():
        at = f"{layer}/" if layer else ""
        kernel = merged[f"{at}kernel"]
        # A factor that lies elsewhere comes now, by a call of all processes. The sums need no other process.
        factors = [_beside(merged.pop(f"{at}lora/{name}"), kernel) for name in _FACTORS]
        merged[f"{at}kernel"] = _sum_leaf(kernel, factors, scale)
    return merged


def _sum_leaf(kernel: Any, factors: list[Any], scale: float) -> Leaf:
    def parts() -> Iterator[tuple[Index, np.ndarray]]:
        yield from array_leaf(_sum(kernel, factors, scale)).parts()

    return Leaf(tuple(kernel.shape), kernel.dtype, parts)


def _sum(kernel: Any, factors: list[Any], scale: float) -> Any:
    if not isinstance(kernel, MpmdArray):
        return merged_kernel(kernel, *factors, scale=scale)
    first = kernel.sharding.on_ranks(kernel.sharding.ranks[:1])
    (rank,) = first.ranks
    part, a, b = (array._partially_addressable_arrays.get(rank) for array in (kernel, *factors))  # pyright: ignore[reportPrivateUsage]
    here = {} if part is None else {rank: jax.device_put(merged_kernel(part, a, b, scale=scale), part.sharding)}
    return MpmdArray(here, first, shape=kernel.shape, dtype=kernel.dtype)


def _beside(factor: Any, kernel: Any) -> Any:
    """Return the factor on the kernel's first rank. Before the first step, it may be on another one."""
    if not isinstance(kernel, MpmdArray) or kernel.sharding.ranks[0] in factor.sharding.ranks:
        return factor
    place = type(kernel.sharding)(kernel.sharding.mpmd_mesh, kernel.sharding.ranks[:1], PartitionSpec())
    return place_on_ranks(on_every_process(factor), place)
