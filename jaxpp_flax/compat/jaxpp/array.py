"""`jaxpp.array`."""

from collections.abc import Set
from typing import TypeVar

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.api import MpmdArray, mpmd_to_spmd_reshard, spmd_to_mpmd_reshard

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
    kept = [
        tuple(axis for axis in entry if axis not in axes)
        if isinstance(entry, tuple)
        else None
        if entry in axes
        else entry
        for entry in sharding_or_pspec
    ]
    return PartitionSpec(*kept)
