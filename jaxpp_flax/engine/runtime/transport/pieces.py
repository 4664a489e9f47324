"""Parts of arrays: the region of each, its cut out of a shard, and the join of several to one shard.

A sharding cuts an array into a grid of equal parts. So the overlaps of one part with the parts of another sharding are
a grid too, and a shard is put together from them axis by axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh

__all__ = ["Region", "cut", "join", "join_on_host", "overlap", "region", "relative", "size_of", "view_on_host"]

# The start and the stop of a part along each dimension.
Region: TypeAlias = tuple[tuple[int, int], ...]

# In bytes: JAX takes an aligned array of NumPy as it is, without a copy.
_ALIGNMENT = 64


def region(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """Write a part of an array in one standard way: on an axis of size 1 a sharding may say `0:8` for all of 8.

    Example:
      >>> region((slice(None), slice(2, 4)), (8, 6))
      ((0, 8), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(first: Region, second: Region) -> Region | None:
    """Return the common region of two; None if they have no element in common.

    Example:
      >>> overlap(((0, 4), (2, 6)), ((2, 8), (0, 3)))
      ((2, 4), (2, 3))
      >>> overlap(((0, 4),), ((4, 8),)) is None
      True
    """
    region = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return region if all(start < stop for start, stop in region) else None


def relative(inner: Region, outer: Region) -> Region:
    """Return the place of a region inside a part that contains it.

    Example:
      >>> relative(((5, 6),), ((4, 8),))
      ((1, 2),)
    """
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def size_of(part: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(stop - start for start, stop in part)


def cut(array: jax.Array, part: Region) -> jax.Array:
    """Return a region of an array on one device, in memory of its own; further dimensions are kept whole."""
    with context_mesh(None):  # no mesh around the call applies to this one device
        return _cutter(part)(array)


def join(pieces: Sequence[tuple[Region, jax.Array]]) -> jax.Array:
    """Join arrays of one device, which are the regions of a grid in any order, to one array."""
    with context_mesh(None):
        return _joiner(tuple(part for part, _ in pieces))(*[array for _, array in pieces])


# Devices of the CPU share the host's memory: there, cut, copy and join are one pass over the values.


def view_on_host(array: jax.Array, part: Region | None) -> np.ndarray:
    """Return a region of an array on one device of the CPU, in the array's own memory; None: all of it. This waits.

    JAX cannot donate the array's memory while the view lives.
    """
    # NumPy values are cached in the array that they come from: in this new one, which ends here.
    own = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    return np.asarray(own)[_slices(part or ())]


def join_on_host(pieces: Sequence[tuple[Region, np.ndarray]], whole: Region, device: Any) -> jax.Array:
    """Write the regions that `whole` consists of into new memory of a device of the CPU.

    Example:
      >>> halves = [(((0, 2),), np.arange(2)), (((2, 4),), np.arange(2, 4))]
      >>> join_on_host(halves, ((0, 4),), jax.devices()[0]).tolist()
      [0, 1, 2, 3]
    """
    first = pieces[0][1]
    shape = (*size_of(whole), *first.shape[len(whole) :])
    size = math.prod(shape) * first.dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    joined = memory[begin : begin + size].view(first.dtype).reshape(shape)
    for part, values in pieces:
        joined[_slices(relative(part, whole))] = values
    return jax.device_put(joined, device)


def _slices(part: Region) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in part)


@cache
def _cutter(part: Region) -> Callable[[Any], Any]:
    def cut_out(array: Any) -> Any:
        rest = array.shape[len(part) :]
        starts = (*(start for start, _ in part), *(0 for _ in rest))
        return lax.slice(array, starts, (*(stop for _, stop in part), *rest))

    return jax.jit(cut_out)


@cache
def _joiner(parts: tuple[Region, ...]) -> Callable[..., Any]:
    def joined(arrays: dict[Region, Any], axis: int) -> Any:
        if len(arrays) == 1:
            return next(iter(arrays.values()))
        rows: dict[tuple[int, int], dict[Region, Any]] = {}
        for part in sorted(arrays):
            rows.setdefault(part[axis], {})[part] = arrays[part]
        parts = [joined(row, axis + 1) for row in rows.values()]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)

    return jax.jit(lambda *arrays: joined(dict(zip(parts, arrays, strict=True)), 0))
