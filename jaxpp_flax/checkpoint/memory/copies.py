"""Copies of a state in a host's slots: what each process writes, and how a later life finds and reads the newest one.

Of parts that several devices hold, one process writes one. The description of a slot, in JSON, says which part of which
leaf each array is; so a later life may have another layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import Wanted, is_key
from jaxpp_flax.checkpoint.memory.slots import Slots, rounded
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place_parts

__all__ = ["StateCopy", "newest_copy", "own_parts"]

Type = tuple[tuple[int, ...], str]


def own_parts(leaves: Mapping[str, Any]) -> tuple[list[jax.Array], dict[str, Any]]:
    """Return the parts of arrays that this process writes, and their description.

    Args:
      leaves: arrays by path, at their places; those of random keys are written as their data.
    """
    parts, places = list[jax.Array](), list[Any]()
    for path, leaf in leaves.items():
        for shard in _own_shards(leaf):
            parts.append(shard.data)
            places.append([path, [of.start or 0 for of in shard.index], shard.data.shape])
    return parts, {"types": {path: _type(leaf) for path, leaf in leaves.items()}, "places": places}


def _own_shards(leaf: Any) -> Iterator[Any]:
    """Yield the parts that this process writes of an array on ranks, or of one that every process has."""
    array = leaf.first_mpmd_replica if isinstance(leaf, MpmdArray) else leaf
    if array is None or (array is leaf and leaf.is_fully_addressable and jax.process_index() != 0):
        return
    array = jax.random.key_data(array) if is_key(array) else array
    yield from (shard for shard in array.addressable_shards if shard.replica_id == 0)


def _type(leaf: Any) -> Type:
    """Return shape and dtype of an array; of random keys, those of their data."""
    want = Wanted.of(leaf)
    return tuple(want.shape), str(np.dtype(want.dtype))


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """A state that is in memory as a whole.

    Attributes:
      serial: of the copy, in `Head`.
      types: shape and dtype of each leaf, by path.
      abouts: the description by each process, in order: with "step", "processes" (how many), and what else it wrote.
    """

    serial: int
    types: Mapping[str, Type]
    abouts: Sequence[Mapping[str, Any]]
    _parts: Mapping[str, Sequence[tuple[Sequence[int], np.ndarray]]]

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.abouts[0]["step"]

    def fits(self, target: Mapping[str, Any]) -> bool:
        """Return True if the copy has the leaves of `target`, arrays or shapes by path, and no others."""
        return self.types == {path: _type(leaf) for path, leaf in target.items()}

    def nonfinite(self, index: int, count: int) -> str | None:
        """Return the path of a parameter with a value that is not finite, of one share of `count`; None if all are."""
        for path in sorted(path for path in self.types if path.startswith("params/"))[index::count]:
            for _, part in self._parts[path]:
                if jnp.issubdtype(part.dtype, jnp.inexact) and not np.isfinite(part).all():
                    return path
        return None

    def place(self, path: str, leaf: Any) -> Any:
        """Return a new array: the values of a leaf, with the type and the sharding of `leaf`."""
        want = Wanted.of(leaf)
        read = lambda index: self._read(path, index)  # noqa: E731
        return want.finish(place_parts(read, want.shape, want.dtype, want.sharding))

    def _read(self, path: str, index: Sequence[slice]) -> np.ndarray:
        """Return a part of a leaf, in memory of its own: a later copy may overwrite the slots."""
        found = np.empty([of.stop - of.start for of in index], jnp.dtype(self.types[path][1]))
        for start, part in self._parts[path]:
            theirs, ours = list[slice](), list[slice]()
            for wanted, begin, size in zip(index, start, part.shape, strict=True):
                first, last = max(wanted.start, begin), min(wanted.stop, begin + size)
                theirs.append(slice(first - begin, max(first, last) - begin))
                ours.append(slice(first - wanted.start, max(first, last) - wanted.start))
            found[tuple(ours)] = part[tuple(theirs)]
        return found


def newest_copy(slots: Slots, intact: Iterable[int], owner: Mapping[str, Any]) -> StateCopy | None:
    """Return the newest copy that slots hold as a whole.

    Args:
      intact: the numbers of the slots whose checksums are right.
      owner: what a slot's description must have, such as the run: a slot of anybody else is not read.
    """
    copies: dict[int, dict[int, dict[str, Any]]] = {}  # descriptions by serial and slot
    for number in sorted(intact):
        head, about = slots.head(number), json.loads(slots.about(number))
        if head is not None and all(about[name] == value for name, value in owner.items()):
            copies.setdefault(head.serial, {})[number] = about
    for serial, abouts in sorted(copies.items(), reverse=True):
        parts: dict[str, list[tuple[Sequence[int], np.ndarray]]] = {}
        types: dict[str, Type] = {}
        for number, about in abouts.items():
            types |= {path: (tuple(shape), dtype) for path, (shape, dtype) in about["types"].items()}
            values, begin = slots.values(number), 0
            for path, start, shape in about["places"]:
                dtype = jnp.dtype(types[path][1])
                size = math.prod(shape) * dtype.itemsize
                part = values[begin : begin + size].view(dtype).reshape(shape)
                parts.setdefault(path, []).append((start, part))
                begin += rounded(part)
        # Parts do not overlap: a leaf is whole if they have as many elements.
        held = {path: sum(part.size for _, part in parts.get(path, ())) for path in types}
        everyone = len(abouts) == next(iter(abouts.values()))["processes"]
        if everyone and all(held[path] == math.prod(shape) for path, (shape, _) in types.items()):
            return StateCopy(serial=serial, types=types, abouts=[*abouts.values()], _parts=parts)
    return None
