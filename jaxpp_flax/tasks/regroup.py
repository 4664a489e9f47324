"""`stack` and `slice`: join the values of several ranks into one value over all of them, and take it apart again.

Both are made of tasks and transfers: a stacked value is copied to every rank of its group before it is cut there. For
values of a few megabytes (losses, norms, gradients of a shared weight) that is as good as handing shards over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.tasks.operations import moved, task
from jaxpp_flax.tasks.recording import Known, Recording, recording_of
from jaxpp_flax.tasks.task_trace import as_asked

__all__ = ["slice", "stack"]


def stack(*arrays: Any) -> Any:
    """Join values of different ranks along a first dimension that is cut over the ranks' axis.

    Args:
      arrays: of one dtype and partition. A value whose first dimension is cut over the ranks' axis already is joined
        along it; another value gets a first dimension of one entry for each of its ranks.

    Returns:
      One value over all the ranks, in the order of the arrays: for tasks whose shardings are over
      `mpmd_mesh.mpmd_submesh(ranks).jax_mesh`.

    Raises (when the mpmd function is lowered):
      RuntimeError: outside of an mpmd function.
      TypeError: if an argument is no value of the mpmd function.
      ValueError: if there is none, two lie on one rank, or they differ in dtype, in partition, or in the shape behind
        the first dimension.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> from jaxpp_flax.tasks import MpmdMesh, mpmd, task
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> on = [NamedSharding(submesh, PartitionSpec()) for submesh in mesh.unstack]
      >>> both = NamedSharding(mesh.jax_mesh, PartitionSpec())
      >>> @mpmd(mesh, in_shardings=tuple(on))
      ... def total(x, y):
      ...     return slice(task(lambda xy: xy.sum(0), out_shardings=both, name="sum")(stack(x, y)), [0, 1])
      >>> [part.tolist() for part in total(np.ones(2), np.ones(2))]
      [[2.0, 2.0], [2.0, 2.0]]
    """
    found = recording_of("`stack`")
    known = [_known(found, array, "stack") for array in arrays]
    axis = found.meshes.mpmd_mesh.mpmd_axis_name
    ranks = [rank for each in known for rank in found.meshes.ranks_in(each.rank)]
    if len(set(ranks)) < len(ranks) or not ranks:
        raise ValueError(
            f"`stack` got values of the ranks {ranks}: it joins one or more values, each of other ranks. Send a value "
            "to a rank of its own first."
        )
    joined = [_is_cut(each, axis, "stack") for each in known]
    tails = [_tail(each, is_joined) for each, is_joined in zip(known, joined, strict=True)]
    types = {
        (str(each.value.dtype), each.value.shape[is_joined:], tail)
        for each, is_joined, tail in zip(known, joined, tails, strict=True)
    }
    if len(types) > 1:
        listed = ", ".join(f"{each.value.dtype}{list(each.value.shape)} as {each.sharding.spec}" for each in known)
        raise ValueError(
            f"`stack` got values that differ behind the first dimension: {listed}. Give them one dtype, shape and spec."
        )
    place = found.meshes.group(ranks)
    repeats = [len(found.meshes.ranks_in(each.rank)) for each in known]
    extents = {_length(each) // n if cut else 1 for each, n, cut in zip(known, repeats, joined, strict=True)}
    if len(extents) > 1:
        raise ValueError(f"`stack` got values with {sorted(extents)} entries for each rank. Give all ranks as many.")

    def join(*parts: Any) -> Any:
        pieces = [p if cut else jnp.stack([p] * n) for p, n, cut in zip(parts, repeats, joined, strict=True)]
        return jnp.concatenate(pieces)

    whole = [
        _whole(found, each, tail) if cut else each.value for each, tail, cut in zip(known, tails, joined, strict=True)
    ]
    there = NamedSharding(found.meshes.unstack[place], PartitionSpec(axis, *tails[0]))
    return task(join, out_shardings=there, name="stack")(*(moved(found, value, place) for value in whole))


def slice(array: Any, groups: Sequence[int | Sequence[int]]) -> tuple[Any, ...]:
    """Take a value over several ranks apart: one value for each group of its ranks.

    Args:
      array: a value of several ranks. If its first dimension is cut over the ranks' axis, each group gets the entries
        of its ranks; otherwise each group gets the whole value.
      groups: ranks, or sequences of ranks: all ranks of the value, in its order.

    Raises (when the mpmd function is lowered):
      RuntimeError: outside of an mpmd function.
      TypeError: if `array` is no value of the mpmd function.
      ValueError: if `groups` are not the value's ranks in order, or its first dimension is cut over more axes.

    Example: see `stack`.

      >>> slice(1.0, [0])
      Traceback (most recent call last):
        ...
      RuntimeError: `slice` was called outside of an mpmd function, ...
    """
    found = recording_of("`slice`")
    known = _known(found, array, "slice")
    axis = found.meshes.mpmd_mesh.mpmd_axis_name
    wanted = [(group,) if isinstance(group, int) else tuple(group) for group in groups]
    ranks = found.meshes.ranks_in(known.rank)
    if tuple(rank for group in wanted for rank in group) != ranks or not all(wanted):
        raise ValueError(
            f"`slice` got the groups {list(groups)} for a value of the ranks {list(ranks)}. Name each of its ranks "
            "once, in this order."
        )
    cut = _is_cut(known, axis, "slice")
    tail = _tail(known, cut)
    each = _length(known) // len(ranks) if cut else 0

    spec = PartitionSpec(None, *tail) if cut else PartitionSpec(*tail)
    whole = NamedSharding(found.meshes.unstack[known.rank], spec)

    def apart(x: Any) -> tuple[Any, ...]:
        x = as_asked(x, whole)  # typed shards cannot be cut anywhere
        starts = [each * sum(map(len, wanted[:i])) for i in range(len(wanted))]
        return tuple(x[s : s + each * len(g)] if cut else x for s, g in zip(starts, wanted, strict=True))

    parts = task(apart, out_shardings=whole, name="slice")(array)
    return tuple(_recut(found, part, group, tail, cut) for part, group in zip(parts, wanted, strict=True))


def _recut(found: Recording, part: Any, group: Sequence[int], tail: tuple[Any, ...], cut: bool) -> Any:
    """Bring a part, whole over the ranks' axis, to its group, and cut it over that axis if the value was."""
    place = found.meshes.group(group)
    there = moved(found, part, place)
    axis = found.meshes.mpmd_mesh.mpmd_axis_name
    spec = PartitionSpec(axis, *tail) if cut else PartitionSpec(*tail)
    return task(lambda x: x, out_shardings=NamedSharding(found.meshes.unstack[place], spec), name="slice")(there)


def _whole(found: Recording, known: Known, tail: tuple[Any, ...]) -> Any:
    sharding = NamedSharding(found.meshes.unstack[known.rank], PartitionSpec(None, *tail))
    return task(lambda x: x, out_shardings=sharding, name="stack")(known.value)


def _known(found: Recording, array: Any, what: str) -> Known:
    known = found.of(array)
    if known is None:
        raise TypeError(
            f"`{what}` got {array!r}, which no task and no argument gave: it has no rank. Make it in a task."
        )
    return known


def _length(known: Known) -> int:
    """Return the size of the first dimension."""
    return int(known.value.shape[0])


def _is_cut(known: Known, axis: str, what: str) -> bool:
    """Return whether the first dimension is cut over the ranks' axis, and over no other."""
    entries = known.sharding.spec.partitions
    if axis not in axes_in(entries):
        return False
    if entries[0] not in (axis, (axis,)) or axis in axes_in(entries[1:]):
        raise ValueError(
            f"`{what}` got {jax.typeof(known.value).str_short()} cut as {known.sharding.spec}: {axis!r} must cut the "
            "first dimension alone. Change the partition in a task before."
        )
    return True


def _tail(known: Known, cut: bool) -> tuple[Any, ...]:
    return tuple(known.sharding.spec.partitions)[1 if cut else 0 :]
