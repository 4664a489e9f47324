"""Moves an argument to ranks that lack it, from another process that has it: mostly state after a new schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxpp_flax.engine.arrays.mesh import RankMeshes, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.replicas import ranks_text
from jaxpp_flax.engine.runtime.host_memory import to_memory
from jaxpp_flax.engine.runtime.transport.base import Tag
from jaxpp_flax.engine.runtime.transport.connection import Connection, DistributedProgram
from jaxpp_flax.engine.runtime.transport.routes import Leaf, plan

__all__ = ["Wanted", "bring", "check_parts", "moved"]


@dataclass(frozen=True)
class Wanted:
    """The demand of a step for an argument: the ranks of its mesh that read it, the partition there, and the memory."""

    mesh: RankMeshes
    ranks: tuple[int, ...]
    spec: PartitionSpec
    name: str
    memory_kind: str | None = None

    def on(self, rank: int) -> NamedSharding:
        """Return its sharding on one rank."""
        return NamedSharding(self.mesh.unstack[rank], self.spec, memory_kind=self.memory_kind)

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that read it."""
        return frozenset[int]().union(*(self.mesh.rank_processes[rank] for rank in self.ranks))

    def is_met_by(self, leaf: MpmdArray) -> bool:
        """Return whether every rank already has the leaf with this partition."""
        sharding = leaf.sharding
        if not sharding.mesh_ids.issuperset(self.ranks) or sharding.mpmd_mesh != self.mesh:
            return False
        return sharding.spec == self.spec and named_memory(sharding) == self.memory_kind


def bring(
    leaf: MpmdArray, wanted: Wanted, distributed: DistributedProgram, call: int, argument: int
) -> dict[int, jax.Array]:
    """Return replicas of `leaf` for this process's wanted ranks; a replica is moved if a rank lacks one.

    Every process calls this with the same array at the same point, because all of them know where the array lives. What
    the devices of a rank have already, they keep.

    No two calls of the step may have the same number `call`; `argument` is the position of the argument.
    """
    found: dict[int, jax.Array] = {}
    for rank in sorted(set(wanted.ranks)):
        target = wanted.on(rank)
        own = next((own for own in leaf.mpmd_idxs if _is_there(leaf, own, target)), None)
        if own is None:
            what = f"rank {rank}: argument{wanted.name} of the step, which rank {ranks_text(leaf.mpmd_idxs)} has"
            tag = distributed.tag(0, call, what, part=f"/argument-{argument}-to-{rank}")
            part = moved(leaf.as_jax_array(), target, distributed.connection, tag)
        else:
            part = leaf._partially_addressable_arrays.get(own)  # pyright: ignore[reportPrivateUsage]
        if part is not None and rank in wanted.mesh.local_ranks:
            found[rank] = part
    return found


def moved(array: jax.Array, target: Sharding, connection: Connection, tag: Tag) -> jax.Array | None:
    """Return a copy of an array with another sharding; None if the sharding has no device of this process.

    Every process calls this at the same point, also one that has no part of the array. Connections to new peers are
    opened on the way. The values travel in device memory.
    """
    if named_memory(array.sharding) is not None:
        (array,) = to_memory([array], [_in_own_memory(array.sharding)])
    leaf = Leaf(array.shape, array.dtype, array.sharding, _in_own_memory(target))
    route = plan((leaf,), jax.process_index())
    connection.connect(route.own_parcels())
    (copy,) = route.move(connection, [array], [True], tag)
    return copy if copy is None or named_memory(target) is None else to_memory([copy], [target])[0]


def _in_own_memory(sharding: Sharding) -> Sharding:
    """Return the same sharding in device memory."""
    return sharding.with_memory_kind("device")


def _is_there(leaf: MpmdArray, rank: int, target: NamedSharding) -> bool:
    """Return whether the replica of `rank` lies on the devices of the target as the target wants it."""
    lies = _in_own_memory(leaf.sharding.local_sharding(rank))
    return lies.device_set == target.device_set and lies.is_equivalent_to(_in_own_memory(target), leaf.ndim)


def check_parts(value: jax.Array, wanted: Wanted) -> None:
    """Refuse an array over several processes if one process lacks parts that it needs; all processes refuse it."""
    has = {device.process_index for device in value.sharding.device_set}
    for rank in wanted.ranks:
        target = wanted.on(rank)
        whole = value.is_fully_replicated and wanted.mesh.rank_processes[rank] <= has
        if not whole and not _same_devices(value, target):
            raise ValueError(
                f"argument{wanted.name}, {value.dtype}{list(value.shape)}, is sharded over several processes as "
                f"{value.sharding}, but the step reads it on rank {rank} as {target}, and the processes of that rank "
                "do not have all of it. Pass it with the sharding that the step takes (`compiled.in_shardings`), or as "
                "a host array that every process has."
            )


def _same_devices(value: jax.Array, target: NamedSharding) -> bool:
    return value.sharding.device_set == target.device_set and value.sharding.is_equivalent_to(target, value.ndim)
