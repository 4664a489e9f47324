"""One transfer between ranks of different processes: its plan for each shard, and the work of this process.

The ends may differ in their number of devices, and partition their replicas differently. Each device of the target
needs the regions that its part has in common with the parts of the source; mostly this is one whole part. If the
target's process already has a region, it copies the region. Any other region is cut out by a device of the source, sent
once to each process that needs it, and copied on inside that process. So no byte crosses twice, and none in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp_flax._compat import copy_arrays
from jaxpp_flax.engine.arrays.placing import key_impl, place
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.engine.runtime.transport.connection import Connection
from jaxpp_flax.engine.runtime.transport.pieces import (
    Region,
    cut,
    join,
    join_on_host,
    overlap,
    region,
    relative,
    size_of,
    view_on_host,
)

__all__ = ["SentLeaf", "Route", "plan"]

Device: TypeAlias = Any
# The regions of a leaf that have come to each device.
_Pieces: TypeAlias = "dict[Device, list[tuple[Region, jax.Array]]]"


@dataclass(frozen=True)
class SentLeaf:
    """One array of a transfer: its type, and its sharding at both ends."""

    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    target: Sharding


@dataclass(frozen=True)
class _Hop:
    """A region of a leaf that goes from one device to devices of one process.

    `cut` is its place in the source's shard; None if it is the whole shard.
    """

    leaf: int
    source: Device
    targets: tuple[Device, ...]
    piece: Region
    cut: Region | None


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

    leaves: tuple[SentLeaf, ...]
    parcels: tuple[tuple[Parcel, tuple[_Hop, ...]], ...]
    local: tuple[_Hop, ...]
    process: int

    def walked(self, in_global_order: bool) -> Sequence[tuple[Parcel, tuple[_Hop, ...]]]:
        """Return the parcels that this process walks through: its own, or all in the one order of all processes."""
        return self.parcels if in_global_order else self._own

    def own_parcels(self) -> list[Parcel]:
        """Return the parcels that this process sends or receives."""
        return [parcel for parcel, _ in self._own]

    @cached_property
    def _own(self) -> list[tuple[Parcel, tuple[_Hop, ...]]]:
        own = [entry for entry in self.parcels if self.process in (entry[0].source, entry[0].target)]
        # Sends come first: a receive may wait.
        return sorted(own, key=lambda entry: entry[0].source != self.process)

    @cached_property
    def _devices(self) -> list[list[Device]]:
        """For each leaf, the devices of this process at its target."""
        on_devices = [leaf.target.devices_indices_map(leaf.shape) for leaf in self.leaves]
        return [[device for device in devices if device.process_index == self.process] for devices in on_devices]

    def move(self, connection: Connection, arrays: Sequence[Any], private: Sequence[bool], tag: Tag) -> list[Any]:
        """Send, receive or pass by: move the arrays, one for each leaf, from source to target.

        Of a `private` array others may give the buffer away, so a copy is sent.

        Returns:
          The arrays at the target; None for those without parts in this process.
        """
        count = connection.window.before_task
        return self._assemble(arrays, self.exchange(connection, arrays, private, tag), count)

    def exchange(
        self, connection: Connection, arrays: Sequence[Any], private: Sequence[bool], tag: Tag
    ) -> list[tuple[_Hop, jax.Array]]:
        """Send what others need of the arrays, as in `move`, and return what this process receives."""
        count = connection.window.before_task
        arrived: list[tuple[_Hop, jax.Array]] = []
        for parcel, hops in self.walked(connection.transport.needs_global_order):
            if parcel.source == self.process:
                connection.transport.send(self._pack(arrays, hops, private, count), parcel, tag)
            elif parcel.target == self.process:
                arrived += zip(hops, connection.recv(parcel, tag), strict=True)
            else:
                connection.transport.pass_by(parcel, tag)
        return arrived

    def copied(self, array: Any, arrived: Sequence[tuple[_Hop, jax.Array]] = ()) -> Any:
        """Return the one array of the transfer at its target, in memory of its own; None without parts here.

        On devices of the CPU this waits.
        """
        devices = [*self._devices[0], *(hop.source for hop in self.local)]
        if _share_memory(devices) and 0 not in self.leaves[0].shape:
            return self._written(array, arrived)
        return self._assemble([array], arrived, lambda: None)[0]

    def _written(self, array: Any, arrived: Sequence[tuple[_Hop, jax.Array]]) -> Any:
        """Write each shard of the one array at its target, on devices of the CPU, in one pass."""
        (leaf,), (devices,) = self.leaves, self._devices
        if not devices:
            return None
        views: dict[Device, list[tuple[Region, Any]]] = {device: [] for device in devices}
        came = [(hop, view_on_host(value, None)) for hop, value in arrived]
        came += [(hop, view_on_host(_to_wire(_shard_on(array, hop.source)), hop.cut)) for hop in self.local]
        for hop, view in came:
            for device in hop.targets:
                views[device].append((hop.piece, view))
        index_of = leaf.target.devices_indices_map(leaf.shape)
        wholes = {device: region(index_of[device], leaf.shape) for device in devices}
        shards = [_from_wire(join_on_host(views[device], wholes[device], device), leaf.dtype) for device in devices]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, shards, dtype=leaf.dtype)

    def _pack(
        self, arrays: Sequence[jax.Array], hops: Sequence[_Hop], private: Sequence[bool], count: Callable[[], None]
    ) -> list[jax.Array]:
        """Return the regions of `arrays` (one for each leaf) for a parcel; whole shards of `private` leaves are copied.

        `count` is called before each computation.
        """
        values = [_taken(arrays[hop.leaf], hop, count) for hop in hops]
        copied = [i for i, hop in enumerate(hops) if private[hop.leaf] and hop.cut is None]
        if copied:
            own = copy_arrays([values[i] for i in copied], [values[i].sharding for i in copied])
            for i, value in zip(copied, own, strict=True):
                values[i] = value
        return values

    def _assemble(
        self,
        arrays: Sequence[jax.Array | None],
        arrived: Sequence[tuple[_Hop, jax.Array]],
        count: Callable[[], None],
    ) -> list[jax.Array | None]:
        """Make the target's leaves from received and local regions; None for a leaf without parts in this process."""
        parts: list[_Pieces] = [{} for _ in self.leaves]
        copies: list[tuple[_Hop, Device, jax.Array]] = []
        for hop, value in arrived:
            first, *others = hop.targets
            parts[hop.leaf].setdefault(first, []).append((hop.piece, value))
            copies += [(hop, device, value) for device in others]
        for hop in self.local:
            array = arrays[hop.leaf]
            if array is not None:
                taken = _taken(array, hop, count)
                copies += [(hop, device, taken) for device in hop.targets]
        targets = [SingleDeviceSharding(device) for _, device, _ in copies]
        for (hop, device, _), copy in zip(copies, copy_arrays([s for *_, s in copies], targets), strict=True):
            parts[hop.leaf].setdefault(device, []).append((hop.piece, copy))
        leaves = zip(self.leaves, self._devices, parts, strict=True)
        return [_joined(leaf, local, part, count) if local else None for leaf, local, part in leaves]


def plan(leaves: tuple[SentLeaf, ...], process: int) -> Route:
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
        shapes = tuple(_wire_type(leaves[hop.leaf], hop) for hop in hops)
        origins = tuple(SingleDeviceSharding(hop.source) for hop in hops)
        parcels.append((Parcel(source, target, shapes, origins), tuple(hops)))
    return Route(leaves, tuple(parcels), tuple(local), process)


def _hops(number: int, leaf: SentLeaf) -> list[_Hop]:
    sources: dict[Region, list[Device]] = {}
    for device, index in leaf.source.devices_indices_map(leaf.shape).items():
        sources.setdefault(region(index, leaf.shape), []).append(device)
    chosen: dict[tuple[Device, int, Region], list[Device]] = {}
    first: dict[tuple[Region, int], Device] = {}
    cuts: dict[Region, Region | None] = {}
    for position, (device, index) in enumerate(leaf.target.devices_indices_map(leaf.shape).items()):
        process, wanted = device.process_index, region(index, leaf.shape)
        for part, holders in sources.items():
            piece = overlap(part, wanted)
            if piece is None:
                continue
            cuts[piece] = None if piece == part else relative(piece, part)
            near = [source for source in holders if source.process_index == process]
            # The devices that hold this part take turns as the sender.
            turn = holders[position % len(holders)]
            nearest = device if device in near else near[0] if near else None
            source = nearest or first.setdefault((piece, process), turn)
            chosen.setdefault((source, process, piece), []).append(device)
    return [_Hop(number, source, tuple(d), piece, cuts[piece]) for (source, _, piece), d in chosen.items()]


def _taken(array: jax.Array, hop: _Hop, count: Callable[[], None]) -> jax.Array:
    """Return the region of a hop on its source, in the form that a transport takes."""
    value = _to_wire(_shard_on(array, hop.source))
    if hop.cut is None:
        return value
    count()
    return cut(value, hop.cut)


def _share_memory(devices: Sequence[Device]) -> bool:
    return all(device.platform == "cpu" for device in devices)


def _shard_on(array: jax.Array, device: Device) -> jax.Array:
    if len(array.sharding.device_set) == 1:
        return array
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def _joined(leaf: SentLeaf, local: Sequence[Device], parts: _Pieces, count: Callable[[], None]) -> jax.Array:
    if 0 in leaf.shape:
        return _empty(leaf)
    shards: list[jax.Array] = []
    for device in local:
        pieces = parts[device]
        if len(pieces) > 1:
            count()
        shards.append(_from_wire(join(pieces) if len(pieces) > 1 else pieces[0][1], leaf.dtype))
    if len(leaf.target.device_set) == 1 and shards[0].sharding == leaf.target:
        return shards[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, shards, dtype=leaf.dtype)


def _empty(leaf: SentLeaf) -> jax.Array:
    """Make an array without elements at its target: there is nothing to move."""
    data = _key_data_type(leaf.shape, leaf.dtype) if _is_key(leaf.dtype) else leaf
    return place(_from_wire(jnp.zeros(data.shape, data.dtype), leaf.dtype), leaf.target)


# PRNG keys are sent as their integers.


def _is_key(dtype: Any) -> bool:
    """Return whether this is the dtype of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _key_data_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the integers of such keys."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


def _to_wire(array: jax.Array) -> jax.Array:
    """Convert an array to the form that a transport takes."""
    return jax.random.key_data(array) if _is_key(array.dtype) else array


def _from_wire(array: jax.Array, dtype: Any) -> jax.Array:
    """Invert `_to_wire`."""
    return jax.random.wrap_key_data(array, impl=key_impl(dtype)) if _is_key(dtype) else array


def _wire_type(leaf: SentLeaf, hop: _Hop) -> jax.ShapeDtypeStruct:
    shape, alone = size_of(hop.piece), SingleDeviceSharding(hop.targets[0])
    if _is_key(leaf.dtype):
        data = _key_data_type(shape, leaf.dtype)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=alone)
    # On a rank of one device, an array with the target's sharding needs no new wrapping.
    whole = len(leaf.target.device_set) == 1 and shape == leaf.shape
    sharding: Sharding = leaf.target if whole else alone
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
