"""Moves an argument to ranks that lack it, from another process that has it: mostly state after a new schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxpp_flax.engine.arrays.mesh import RankMeshes, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram
from jaxpp_flax.engine.runtime.transport.routes import Leaf, plan

__all__ = ["Wanted", "bring", "check_parts"]


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

    Every process calls this with the same array at the same point, because all of them know where the array lives.
    Connections to new peers are opened on the way. A replica that is moved arrives with the partition that the step
    wants, in device memory, also if it lies in host memory; what the devices of a rank have already, they keep.

    No two calls of the step may have the same number `call`; `argument` is the position of the argument.

    """
    parts = leaf._partially_addressable_arrays  # pyright: ignore[reportPrivateUsage]
    routes = {rank: _origin(leaf, wanted, rank) for rank in sorted(set(wanted.ranks))}
    found: dict[int, jax.Array] = {}
    for rank, (source, target) in routes.items():
        part = parts.get(source)
        if target is not None:
            what = f"rank {rank}: argument{wanted.name} of the step, which rank {source} has"
            lies = _in_own_memory(leaf.sharding.local_sharding(source))
            route = plan((Leaf(leaf.shape, leaf.dtype, lies, target),), jax.process_index())
            distributed.connection.connect(route.own_parcels())
            if part is not None and part.is_deleted():
                raise RuntimeError(leaf._deleted_message(source))  # pyright: ignore[reportPrivateUsage]
            if part is not None and named_memory(part.sharding) is not None:  # only device memory is sent
                part = jax.device_put(part, lies)
            tag = distributed.tag(0, call, what, part=f"/argument-{argument}-to-{rank}")
            (part,) = route.move(distributed.connection, [part], [True], tag)
        if part is not None and rank in wanted.mesh.local_ranks:
            found[rank] = part
    return found


def _origin(leaf: MpmdArray, wanted: Wanted, rank: int) -> tuple[int, NamedSharding | None]:
    """Return the rank of the leaf's mesh that sends its replica, and the sharding with which the replica arrives.

    The sharding is None if each process of the rank can make its parts from its own parts of that replica.
    """
    sharding, target = leaf.sharding, _in_own_memory(wanted.on(rank))
    for own in leaf.mpmd_idxs:
        lies = _in_own_memory(sharding.local_sharding(own))
        if lies.device_set == target.device_set and _can_repartition(lies, target, len(leaf.shape)):
            return own, None
    # A replica is near if its process also has devices of the target rank.
    owners = _processes(target)
    source = min(leaf.mpmd_idxs, key=lambda own: (_processes(sharding.local_sharding(own)) != owners, own))
    return source, target


def _in_own_memory(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in device memory; a moved value goes to another memory inside its process."""
    return NamedSharding(sharding.mesh, sharding.spec)


def _processes(sharding: Sharding) -> set[int]:
    return {device.process_index for device in sharding.device_set}


def _can_repartition(lies: NamedSharding, target: NamedSharding, ndim: int) -> bool:
    """Return whether each process can make its parts of `target` from its parts of `lies`, on the same devices."""
    return len(_processes(target)) == 1 or lies.is_fully_replicated or lies.is_equivalent_to(target, ndim)


def check_parts(value: jax.Array, wanted: Wanted) -> None:
    """Refuse an array over several processes if one process lacks parts that it needs; all processes refuse it."""
    has = _processes(value.sharding)
    for rank in wanted.ranks:
        target = wanted.on(rank)
        whole = value.is_fully_replicated and _processes(target) <= has
        if not whole and not _same_devices(value, target):
            raise ValueError(
                f"argument{wanted.name}, {value.dtype}{list(value.shape)}, is sharded over several processes as "
                f"{value.sharding}, but the step reads it on rank {rank} as {target}, and the processes of that rank "
                "do not have all of it. Pass it with the sharding that the step takes (`compiled.in_shardings`), or as "
                "a host array that every process has."
            )


def _same_devices(value: jax.Array, target: NamedSharding) -> bool:
    return value.sharding.device_set == target.device_set and value.sharding.is_equivalent_to(target, value.ndim)
