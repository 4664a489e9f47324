"""One transfer between ranks of different processes: its plan for each shard, and the work of this process.

Both ends hold their replica with the same spec. So every device of the target needs a part that some device of the
source has. If the target's process already has a part, it copies the part. Any other part is sent once to each
process that needs it, and copied on inside that process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jaxpp_flax._compat import copy_arrays
from jaxpp_flax.engine.arrays.placing import key_impl
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.engine.runtime.transport.connection import Connection

__all__ = ["Leaf", "Route", "plan", "standard_index"]

Device: TypeAlias = Any


@dataclass(frozen=True)
class Leaf:
    """One array of a transfer: its type, and its sharding at both ends."""

    shape: tuple[int, ...]
    dtype: Any
    source: NamedSharding
    target: NamedSharding


@dataclass(frozen=True)
class _Hop:
    """A part of a leaf that goes from one device to devices of one process."""

    leaf: int
    source: Device
    targets: tuple[Device, ...]


@dataclass(frozen=True)
class Route:
    """The work of one process in a transfer.

    Attributes:
      leaves: the transfer's arrays.
      parcels: all parcels of the transfer in one global order, with the hops that each contains; parcels between two
        other processes are included.
      local: hops inside this process.
      process: this process.
    """

    leaves: tuple[Leaf, ...]
    parcels: tuple[tuple[Parcel, tuple[_Hop, ...]], ...]
    local: tuple[_Hop, ...]
    process: int

    def own_parcels(self) -> list[Parcel]:
        """Return the parcels that this process sends or receives."""
        return [parcel for parcel, _ in self._own]

    @cached_property
    def _own(self) -> list[tuple[Parcel, tuple[_Hop, ...]]]:
        own = [entry for entry in self.parcels if self.process in (entry[0].source, entry[0].target)]
        # Sends come first: a receive may wait.
        return sorted(own, key=lambda entry: entry[0].source != self.process)

    def move(self, connection: Connection, arrays: Sequence[Any], private: Sequence[bool], tag: Tag) -> list[Any]:
        """Send, receive or pass by: move the arrays, one for each leaf, from source to target.

        Of a `private` array others may give the buffer away, so a copy is sent.

        Returns:
          The arrays at the target; None for those without parts in this process.
        """
        arrived: list[tuple[_Hop, jax.Array]] = []
        for parcel, hops in self.parcels if connection.transport.needs_global_order else self._own:
            if parcel.source == self.process:
                connection.transport.send(self.pack(arrays, hops, private=private), parcel, tag)
            elif parcel.target == self.process:
                arrived += zip(hops, connection.recv(parcel, tag), strict=True)
            else:
                connection.transport.pass_by(parcel, tag)
        return self.assemble(arrays, arrived)

    def pack(self, arrays: Sequence[jax.Array], hops: Sequence[_Hop], *, private: Sequence[bool]) -> list[jax.Array]:
        """Return the parts of `arrays` (one for each leaf) for a parcel; parts of `private` leaves are copied."""
        values = [to_wire(_shard_on(arrays[hop.leaf], hop.source)) for hop in hops]
        copied = [i for i, hop in enumerate(hops) if private[hop.leaf]]
        if copied:
            own = copy_arrays([values[i] for i in copied], [values[i].sharding for i in copied])
            for i, value in zip(copied, own, strict=True):
                values[i] = value
        return values

    def assemble(
        self, arrays: Sequence[jax.Array | None], arrived: Sequence[tuple[_Hop, jax.Array]]
    ) -> list[jax.Array | None]:
        """Make the target's leaves from received and local parts; None for a leaf without parts in this process."""
        parts: list[dict[Device, jax.Array]] = [{} for _ in self.leaves]
        copies: list[tuple[int, Device, jax.Array]] = []
        for hop, value in arrived:
            first, *others = hop.targets
            value = from_wire(value, self.leaves[hop.leaf].dtype)
            parts[hop.leaf][first] = value
            copies += [(hop.leaf, device, value) for device in others]
        for hop in self.local:
            array = arrays[hop.leaf]
            if array is not None:
                shard = _shard_on(array, hop.source)
                copies += [(hop.leaf, device, shard) for device in hop.targets]
        targets = [SingleDeviceSharding(device) for _, device, _ in copies]
        for (leaf, device, _), copy in zip(copies, copy_arrays([s for *_, s in copies], targets), strict=True):
            parts[leaf][device] = copy
        return [_joined(leaf, part, self.process) for leaf, part in zip(self.leaves, parts, strict=True)]


def plan(leaves: Sequence[Leaf], process: int, what: str) -> Route:
    """Plan a transfer as `process` sees it; all processes make the same parcels in the same order."""
    crossing: dict[tuple[int, int], list[_Hop]] = {}
    local: list[_Hop] = []
    for number, leaf in enumerate(leaves):
        if 0 in leaf.shape:
            continue
        for hop in _hops(number, leaf):
            pair = hop.source.process_index, hop.targets[0].process_index
            if pair[0] != pair[1]:
                crossing.setdefault(pair, []).append(hop)
            elif pair[0] == process:
                local.append(hop)
    parcels: list[tuple[Parcel, tuple[_Hop, ...]]] = []
    for (source, target), hops in crossing.items():
        shapes = tuple(_wire_type(leaves[hop.leaf], hop.targets[0]) for hop in hops)
        origins = tuple(SingleDeviceSharding(hop.source) for hop in hops)
        parcels.append((Parcel(source, target, shapes, origins, what), tuple(hops)))
    return Route(tuple(leaves), tuple(parcels), tuple(local), process)


def _hops(number: int, leaf: Leaf) -> list[_Hop]:
    sources: dict[Any, list[Device]] = {}
    for device, index in leaf.source.devices_indices_map(leaf.shape).items():
        sources.setdefault(standard_index(index, leaf.shape), []).append(device)
    chosen: dict[tuple[Device, int], list[Device]] = {}
    first: dict[tuple[Any, int], Device] = {}
    for place, (device, index) in enumerate(leaf.target.devices_indices_map(leaf.shape).items()):
        process, part = device.process_index, standard_index(index, leaf.shape)
        near = [source for source in sources[part] if source.process_index == process]
        # The devices that hold this part take turns as the sender.
        turn = sources[part][place % len(sources[part])]
        source = near[0] if near else first.setdefault((part, process), turn)
        chosen.setdefault((source, process), []).append(device)
    return [_Hop(number, source, tuple(devices)) for (source, _), devices in chosen.items()]


def standard_index(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Write a part of an array in one standard way: on an axis of size 1 a sharding may say `0:8` for all of 8."""
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _shard_on(array: jax.Array, device: Device) -> jax.Array:
    if len(array.sharding.device_set) == 1:
        return array
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def _joined(leaf: Leaf, parts: dict[Device, jax.Array], process: int) -> jax.Array | None:
    local = [d for d in leaf.target.devices_indices_map(leaf.shape) if d.process_index == process]
    if not local:
        return None
    if 0 in leaf.shape:
        return empty(leaf)
    if len(leaf.target.device_set) == 1 and parts[local[0]].sharding == leaf.target:
        return parts[local[0]]
    shards = [parts[device] for device in local]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, shards, dtype=leaf.dtype)


def empty(leaf: Leaf) -> jax.Array:
    """Make an array without elements at its target: there is nothing to move."""
    if is_key(leaf.dtype):
        aval = key_data_type(leaf.shape, leaf.dtype)
        data = jnp.zeros(aval.shape, aval.dtype)
        return jax.device_put(jax.random.wrap_key_data(data, impl=key_impl(leaf.dtype)), leaf.target)
    shape = leaf.target.shard_shape(leaf.shape)
    devices = [d for d in leaf.target.devices_indices_map(leaf.shape) if d.process_index == jax.process_index()]
    shards = [jax.device_put(np.zeros(shape, leaf.dtype), device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, shards, dtype=leaf.dtype)


# PRNG keys are sent as their integers.


def is_key(dtype: Any) -> bool:
    """Return whether this is the dtype of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_data_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the integers of such keys."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


def to_wire(array: jax.Array) -> jax.Array:
    """Convert an array to the form that a transport takes."""
    return jax.random.key_data(array) if is_key(array.dtype) else array


def from_wire(array: jax.Array, dtype: Any) -> jax.Array:
    """Invert `to_wire`."""
    return jax.random.wrap_key_data(array, impl=key_impl(dtype)) if is_key(dtype) else array


def _wire_type(leaf: Leaf, device: Device) -> jax.ShapeDtypeStruct:
    # On a rank of one device, an array with the target's sharding needs no new wrapping.
    alone = len(leaf.target.device_set) == 1
    sharding: Sharding = leaf.target if alone else SingleDeviceSharding(device)
    shape = leaf.target.shard_shape(leaf.shape)
    if is_key(leaf.dtype):
        data = key_data_type(shape, leaf.dtype)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=SingleDeviceSharding(device))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
