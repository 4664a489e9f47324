"""The local replicas of an `MpmdArray`: the rank of each, and the checks of its type and place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from jaxpp_flax.engine.arrays.mesh import MpmdSharding

__all__ = ["checked_type", "ranks_text", "replicas_by_rank", "type_text"]


def replicas_by_rank(
    arrays: Mapping[int, jax.Array] | Sequence[jax.Array], sharding: MpmdSharding
) -> dict[int, jax.Array]:
    """Return the arrays by rank, ascending; in a sequence the devices tell the rank, and each rank is used once."""
    parts: dict[int, jax.Array] = {}
    if isinstance(arrays, Mapping):
        parts = {rank: arrays[rank] for rank in sorted(arrays)}
        for rank in parts:
            if rank not in sharding.ranks:
                raise ValueError(
                    f"MpmdArray got an array for rank {rank}; its sharding has the ranks {sharding.ranks}."
                )
        return parts
    for position, array in enumerate(arrays):
        devices = array.devices()
        fitting = [r for r in sharding.ranks if set(sharding.mpmd_mesh.rank_devices(r)) == devices and r not in parts]
        if not fitting:
            raise ValueError(
                f"MpmdArray: array {position}, {type_text(array)} on {sorted(map(str, devices))}, is on the devices of "
                f"none of the ranks {sharding.ranks} that have no array yet. Put it on one of them first: "
                "`jax.device_put(array, sharding.local_sharding(rank))`."
            )
        parts[fitting[0]] = array
    return {rank: parts[rank] for rank in sorted(parts)}


def checked_type(
    parts: Mapping[int, jax.Array], sharding: MpmdSharding, shape: Sequence[int] | None, dtype: Any
) -> ShapedArray:
    """Return the type of the whole array; refuse replicas of another type, or with another partition."""
    first = next(iter(parts.values()), None)
    shape = first.shape if shape is None and first is not None else shape
    dtype = first.dtype if dtype is None and first is not None else dtype
    if shape is None or dtype is None:
        raise ValueError(
            f"MpmdArray on the ranks {sharding.ranks} got no local array, so its type is unknown here: "
            f"pass `shape` and `dtype` (got shape={shape}, dtype={dtype})."
        )
    aval = ShapedArray(tuple(shape), dtype, weak_type=bool(getattr(first, "weak_type", False)))
    for rank, part in parts.items():
        if (part.shape, part.dtype) != (aval.shape, aval.dtype):
            raise ValueError(
                f"MpmdArray: the array of rank {rank} is {type_text(part)}, the whole one is "
                f"{type_text(aval)}. All replicas have one shape and one dtype."
            )
        wanted = sharding.local_sharding(rank)
        if not part.sharding.is_equivalent_to(wanted, part.ndim):
            raise ValueError(
                f"MpmdArray: the array of rank {rank}, {type_text(part)}, is sharded as {part.sharding}; the sharding "
                f"asks for {wanted}. Move it there with `jax.device_put(array, sharding.local_sharding({rank}))`."
            )
    return aval


def type_text(array: Any) -> str:
    """Return the dtype and the shape of an array, for messages."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def ranks_text(numbers: Iterable[int]) -> str:
    """Return the numbers of ranks, for messages."""
    return ", ".join(map(str, numbers))
