"""`jaxpp.array`."""

from collections.abc import Set
from typing import TypeVar

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.api import MpmdArray, mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from jaxpp_flax.engine.arrays.mesh import keep_axes

__all__ = ["MpmdArray", "filter_axes", "mpmd_to_spmd_reshard", "spmd_to_mpmd_reshard"]

S = TypeVar("S", NamedSharding, PartitionSpec)


def filter_axes(sharding_or_pspec: S, axes: Set[str]) -> S:
    """Return a sharding or a spec without some axes of the mesh.

    Example:
      >>> tuple(filter_axes(PartitionSpec(("stage", "data"), None, "model"), {"stage"}))
      ('data', None, 'model')
    """
    if isinstance(sharding_or_pspec, NamedSharding):
        return sharding_or_pspec.update(spec=filter_axes(sharding_or_pspec.spec, axes))
    return keep_axes(sharding_or_pspec, lambda axis: axis not in axes)
