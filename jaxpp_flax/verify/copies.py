"""The copies of one array must be equal: on the devices of a rank, on several ranks, and in several processes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.processes import exchange_values, process_group, value_hash
from jaxpp_flax.verify.comparison import row_of
from jaxpp_flax.verify.report import Row
from jaxpp_flax.verify.rounding import FACTOR, apart, on_host, unit_of
from jaxpp_flax.verify.runs.points import Point

__all__ = ["differing_copies"]


def differing_copies(tree: Any, when: str, *, is_across: bool) -> list[Row]:
    """Return a row for each array of which two copies differ.

    Args:
      tree: a state; with several processes, all call this with theirs.
      when: before or after the step, in words for the row.
      is_across: the ranks belong to several processes.
    """
    rows, hashes = list[Row](), dict[str, str | None]()
    process = process_group().process_index
    for path, leaf in flatten(tree)[0].items():
        if not isinstance(leaf, MpmdArray):
            continue
        first = dict[str, tuple[str, Any]]()
        for place, index, array in _copies(leaf):
            name, expected = first.setdefault(index, (place, array))
            allowed = FACTOR * unit_of(expected)
            if name != place and (apart(expected, array) > allowed).any():
                row = row_of(Point("state", path), expected, array, unit_of(expected), allowed, process)
                rows.append(_named(row, f"{when}, the copy on {place} is another one than that on {name}"))
        if is_across and leaf.size > 1:  # a number may differ by rounding: programs of several ranks compute it
            hashes |= {f"{path} {index}": value_hash(array) for index, (_, array) in first.items()}
    return rows + (_differing_between_processes(hashes, when) if is_across else [])


def _copies(array: MpmdArray) -> list[tuple[str, str, Any]]:
    """Return the place of each part in this process, the indices that it holds, and the part on the host."""
    return [
        (f"device {shard.device} of rank {rank}", str(shard.index), on_host(shard.data))
        for rank, part in array._partially_addressable_arrays.items()  # pyright: ignore[reportPrivateUsage]
        for shard in part.addressable_shards
    ]


def _differing_between_processes(own: dict[str, str | None], when: str) -> list[Row]:
    """Return a row for each array of which two processes have copies that differ."""
    known, rows = dict[str, tuple[int, str | None]](), list[Row]()
    for process, hashes in enumerate(exchange_values(process_group(), f"the copies {when}", own, timeout_s=None)):
        for name, of in hashes.items():
            holder, expected = known.setdefault(name, (process, of))
            if of != expected:
                path = name.partition(" ")[0]
                row = Row(
                    kind="state", block="", leaf=path, index=(), expected=math.nan, actual=math.nan, distance=math.inf,
                    allowed=0.0, process=process, is_of_hashes=True,
                )  # fmt: skip
                rows.append(_named(row, f"{when}, process {process} has another copy than process {holder}"))
    return rows


def _named(row: Row, likely: str) -> Row:
    return replace(row, likely=f"copies of one array that differ: {likely}", is_whole=True)
