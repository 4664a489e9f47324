"""Parts of arrays: the region of each, its cut out of a shard, and the join of several to one shard.

A sharding cuts an array into a grid of equal parts. So the overlaps of one part with the parts of another sharding are
a grid too, and a shard is put together from them axis by axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
from jax import lax

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh

__all__ = ["Region", "cut", "join", "overlap", "region", "relative", "size_of"]

# The start and the stop of a part along each dimension.
Region: TypeAlias = tuple[tuple[int, int], ...]


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
