"""Copies of a state in a host's slots: what each process writes, and how a later life finds and reads the newest one.

Of parts that several devices hold, one process writes one. The description of a slot, in JSON, says which part of which
leaf each array is; so a later life may have another layout. Of slots that only other hosts have, each process reads the
parts that it needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import WantedLeaf, is_key
from jaxpp_flax.checkpoint.memory.slots import SlotHead, Slots, rounded
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place_parts

__all__ = ["Fetch", "HeldSlot", "Part", "StateCopy", "newest_copy", "own_parts"]

Type = tuple[tuple[int, ...], str]
# Brings bytes of a host's file to the same place in this host's: the host, the first byte, and how many.
Fetch = Callable[[int, int, int], None]


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
    want = WantedLeaf.of(leaf)
    return tuple(want.shape), str(np.dtype(want.dtype))


@dataclass(frozen=True)
class HeldSlot:
    """A slot whose checksums are right.

    Attributes:
      number, head: of the slot.
      host: which host has it; None: this one.
    """

    number: int
    head: SlotHead
    host: int | None = None


@dataclass(eq=False)
class Part:
    """A part of a leaf.

    Attributes:
      start: its first index in each dimension.
      bring: brings the values from another host; None: they are here.
    """

    start: Sequence[int]
    _values: np.ndarray
    bring: Callable[[], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    def read(self) -> np.ndarray:
        """Return the values, without a copy."""
        if self.bring is not None:
            self.bring()
            self.bring = None
        return self._values


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """A state that is in memory as a whole.

    Attributes:
      serial: of the copy, in `SlotHead`.
      types: shape and dtype of each leaf, by path.
      abouts: the description by each process, in order: with "step", "processes" (how many), and what else it wrote.
    """

    serial: int
    types: Mapping[str, Type]
    abouts: Sequence[Mapping[str, Any]]
    _parts: Mapping[str, Sequence[Part]]

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.abouts[0]["step"]

    def fits(self, target: Mapping[str, Any]) -> bool:
        """Return True if the copy has the leaves of `target`, arrays or shapes by path, and no others."""
        return self.types == {path: _type(leaf) for path, leaf in target.items()}

    def nonfinite(self, index: int, count: int) -> str | None:
        """Return the path of a parameter with a value that is not finite, of one share of `count`; None if all are.

        Each host looks at what it has.
        """
        for path in sorted(path for path in self.types if path.startswith("params/"))[index::count]:
            for values in [part.read() for part in self._parts[path] if part.bring is None]:
                if jnp.issubdtype(values.dtype, jnp.inexact) and not np.isfinite(values).all():
                    return path
        return None

    def place(self, path: str, leaf: Any) -> Any:
        """Return a new array: the values of a leaf, with the type and the sharding of `leaf`."""
        want = WantedLeaf.of(leaf)
        read = lambda index: self._read(path, index)  # noqa: E731
        return want.finish(place_parts(read, want.shape, want.dtype, want.sharding))

    def _read(self, path: str, index: Sequence[slice]) -> np.ndarray:
        """Return a part of a leaf, in memory of its own: a later copy may overwrite the slots."""
        found = np.empty([of.stop - of.start for of in index], jnp.dtype(self.types[path][1]))
        for part in self._parts[path]:
            theirs, ours = list[slice](), list[slice]()
            for wanted, begin, size in zip(index, part.start, part.shape, strict=True):
                first, last = max(wanted.start, begin), min(wanted.stop, begin + size)
                theirs.append(slice(first - begin, max(first, last) - begin))
                ours.append(slice(first - wanted.start, max(first, last) - wanted.start))
            if found[tuple(ours)].size:
                found[tuple(ours)] = part.read()[tuple(theirs)]
        return found


def newest_copy(
    slots: Slots, held: Iterable[HeldSlot], owner: Mapping[str, Any], fetch: Fetch | None = None
) -> StateCopy | None:
    """Return the newest copy that slots hold as a whole. All processes find the same one.

    Args:
      slots: those of this host.
      held: those of all hosts that have their marks and the right checksums.
      owner: what a slot's description must have, such as the run: a slot of anybody else is not read.
      fetch: for slots of other hosts.
    """
    copies: dict[int, dict[int, HeldSlot]] = {}  # by serial and number
    for slot in held:
        copy = copies.setdefault(slot.head.serial, {})
        if slot.number not in copy or slot.host is None:
            copy[slot.number] = slot
    for serial, chosen in sorted(copies.items(), reverse=True):
        parts: dict[str, list[Part]] = {}
        types: dict[str, Type] = {}
        abouts: list[dict[str, Any]] = []
        for _, slot in sorted(chosen.items()):
            about = _about(slots, slot, fetch)
            if all(about[name] == value for name, value in owner.items()):
                abouts.append(about)
                types |= {path: (tuple(shape), dtype) for path, (shape, dtype) in about["types"].items()}
                for path, part in _parts(slots, slot, about, types, fetch):
                    parts.setdefault(path, []).append(part)
        # Parts do not overlap: a leaf is whole if they have as many elements.
        elements = {path: sum(math.prod(part.shape) for part in parts.get(path, ())) for path in types}
        everyone = bool(abouts) and len(abouts) == abouts[0]["processes"]
        if everyone and all(elements[path] == math.prod(shape) for path, (shape, _) in types.items()):
            return StateCopy(serial=serial, types=types, abouts=abouts, _parts=parts)
    return None


def _about(slots: Slots, slot: HeldSlot, fetch: Fetch | None) -> dict[str, Any]:
    if slot.host is not None and fetch is not None:
        begin, head, values, about = slots.extent(slot.number, slot.head)
        slots.unmark(slot.number)  # what is here is of another step, and gets parts of this one
        fetch(slot.host, begin + head + values, about)
    return json.loads(slots.about(slot.number, slot.head))


def _parts(
    slots: Slots, slot: HeldSlot, about: Mapping[str, Any], types: Mapping[str, Type], fetch: Fetch | None
) -> Iterator[tuple[str, Part]]:
    """Yield the parts in a slot, with the paths of their leaves."""
    values, begin = slots.values(slot.number, slot.head), 0
    place = slots.extent(slot.number, slot.head)
    for path, start, shape in about["places"]:
        dtype = jnp.dtype(types[path][1])
        size = math.prod(shape) * dtype.itemsize
        array, bring = values[begin : begin + size].view(dtype).reshape(shape), None
        if slot.host is not None and fetch is not None:
            bring = partial(fetch, slot.host, place.begin + place.head + begin, size)
        yield path, Part(start, array, bring)
        begin += rounded(array)
