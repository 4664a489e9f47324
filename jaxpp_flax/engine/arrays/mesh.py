"""`MpmdMesh`: a device mesh with one axis that counts pipeline ranks; `MpmdSharding`: the place of an array in it.

Each position along that axis is one rank: a group of devices that runs programs of its own. All ranks share the other
axes (data, fsdp, tensor, expert), which shard the arrays inside each rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat import is_described

__all__ = [
    "MpmdMesh",
    "MpmdSharding",
    "RankMeshes",
    "axes_in",
    "canonical",
    "carried_over",
    "entry_of",
    "keep_axes",
    "lies_alike",
    "named_memory",
]

# A jax.Device: JAX exports that name as a variable, which type checkers refuse in annotations.
Device: TypeAlias = Any


class RankMeshes(ABC):
    """The ranks of a program, each with a mesh of its own: an `MpmdMesh`, or meshes of different shapes."""

    @cached_property
    @abstractmethod
    def unstack(self) -> Sequence[Mesh]:
        """The mesh of each rank."""

    @cached_property
    def _rank_devices(self) -> tuple[tuple[Device, ...], ...]:
        return tuple(tuple(mesh.devices.flat) for mesh in self.unstack)

    def rank_devices(self, rank: int) -> tuple[Device, ...]:
        """Return the devices of one rank, in the order of its mesh."""
        return self._rank_devices[rank]

    @cached_property
    def is_described(self) -> bool:
        """True if the devices are only described: tasks compile for them, and nothing can lie or run there."""
        return is_described(self.rank_devices(0)[0])

    def check_attached(self, what: str) -> None:
        """Refuse `what`, a call in words, if the devices are only described.

        Raises:
          RuntimeError: the message names a device.
        """
        if self.is_described:
            raise RuntimeError(
                f"{what} needs the mesh's devices, but this process only has a description of them "
                f"({self.rank_devices(0)[0]}, ...), for which it compiles. Read what is compiled, and do this where "
                "`jax.devices()` lists the mesh's devices."
            )

    @cached_property
    def rank_processes(self) -> tuple[frozenset[int], ...]:
        """For each rank, the processes that have devices of it; described devices belong to each process alone."""
        if self.is_described:
            return (frozenset({jax.process_index()}),) * len(self.unstack)
        return tuple(frozenset(device.process_index for device in devices) for devices in self._rank_devices)

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have devices of some rank."""
        return frozenset[int]().union(*self.rank_processes)

    @cached_property
    def is_multi_process(self) -> bool:
        """True if other processes have devices of some rank."""
        return self.processes != frozenset({jax.process_index()})

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks with at least one device in this process: the process takes part in their tasks."""
        process = jax.process_index()
        return tuple(rank for rank, owners in enumerate(self.rank_processes) if process in owners)


@dataclass(frozen=True, repr=False)
class MpmdMesh(RankMeshes):
    """A `jax.sharding.Mesh` with the name of the axis along which different programs run.

    Args:
      jax_mesh: the mesh of all devices. A device may belong to several ranks: one GPU can hold four stages.
      mpmd_axis_name: the name of the axis that counts the ranks.

    Raises:
      TypeError: if `jax_mesh` is not a `jax.sharding.Mesh`.
      ValueError: if the mesh has no such axis.

    Example:
      >>> import jax, numpy as np
      >>> devices = np.array(jax.devices()[:4]).reshape(2, 2)
      >>> mesh = MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data")), "stage")
      >>> mesh
      MpmdMesh({'stage': 2, 'data': 2}, mpmd_axis_name='stage')
      >>> mesh.mpmd_dim, dict(mesh.unstack[1].shape), [device.id for device in mesh.rank_devices(1)]
      (2, {'stage': 1, 'data': 2}, [2, 3])

    The names come from NVIDIA's JaxPP (Xhebraj, Lee, Chen and Grover, 2024).
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    def __post_init__(self) -> None:
        mesh: Any = self.jax_mesh
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"MpmdMesh needs a jax.sharding.Mesh of devices, got {type(mesh).__name__}. "
                'Build one with `jax.sharding.Mesh(np.array(jax.devices()).reshape(4, -1), ("stage", "data"))`.'
            )
        if self.mpmd_axis_name not in mesh.axis_names:
            raise ValueError(
                f"MpmdMesh: the mesh has no axis {self.mpmd_axis_name!r}; its axes are "
                f"{dict(mesh.shape)}. Pass the name of the axis that counts the pipeline ranks as `mpmd_axis_name`."
            )

    def __eq__(self, other: object) -> bool:
        # Also equal to a mesh of a subclass, such as `jaxpp_flax.api.MpmdMesh`.
        if not isinstance(other, MpmdMesh):
            return NotImplemented
        return (self.jax_mesh, self.mpmd_axis_name) == (other.jax_mesh, other.mpmd_axis_name)

    def __repr__(self) -> str:
        return f"MpmdMesh({dict(self.jax_mesh.shape)}, mpmd_axis_name={self.mpmd_axis_name!r})"

    @cached_property
    def mpmd_axis(self) -> int:
        """The position of the ranks' axis among the mesh's axes."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @cached_property
    def mpmd_dim(self) -> int:
        """The number of ranks."""
        return self.jax_mesh.devices.shape[self.mpmd_axis]

    @cached_property
    def unstack(self) -> list[Mesh]:
        """The submesh of each rank: its devices under all axes of the mesh. The ranks' axis has size 1."""
        axis = self.mpmd_axis
        types = list(self.jax_mesh.axis_types)
        # No array is ever partitioned over the ranks' axis, so its type must not decide the type of the submesh.
        others = types[:axis] + types[axis + 1 :]
        types[axis] = AxisType.Explicit if AxisType.Explicit in others else AxisType.Auto
        parts = np.split(self.jax_mesh.devices, self.mpmd_dim, axis)
        return [Mesh(part, self.jax_mesh.axis_names, axis_types=tuple(types)) for part in parts]

    @cached_property
    def abstract_submesh(self) -> AbstractMesh:
        """The ranks' submesh without its devices, for tracing a program that any rank may run."""
        # Taken from a submesh: an abstract mesh built by hand lacks the device kind and is unequal to it.
        return self.unstack[0].abstract_mesh

    @cached_property
    def is_explicit(self) -> bool:
        """True if shardings over an axis of the submesh are part of the arrays' types."""
        return AxisType.Explicit in self.unstack[0].axis_types

    def lowering_mesh(self) -> Mesh:
        """Return the submesh for tracing: of this process's first rank, or of rank 0 if the process has no rank."""
        return self.unstack[self.local_ranks[0] if self.local_ranks else 0]

    def mpmd_submesh(self, mpmd_indices: Iterable[int]) -> MpmdMesh:
        """Return the mesh of some ranks, in the given order; all axes stay, the ranks' axis gets shorter.

        Raises:
          ValueError: if `mpmd_indices` is empty or names a rank that the mesh does not have.
        """
        indices = [self.check_rank(rank) for rank in mpmd_indices]
        if not indices:
            raise ValueError(f"mpmd_submesh of {self!r} got no rank: a mesh needs at least one device.")
        devices = np.take(self.jax_mesh.devices, indices, self.mpmd_axis)
        mesh = Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types)
        return type(self)(mesh, self.mpmd_axis_name)

    def rank_devices(self, rank: int) -> tuple[Device, ...]:
        """Return the devices of one rank, in the order of its submesh."""
        return super().rank_devices(self.check_rank(rank))

    def is_local(self, rank: int) -> bool:
        """Return whether this process owns a device of `rank`."""
        return self.check_rank(rank) in self.local_ranks

    def check_rank(self, rank: int) -> int:
        """Return `rank` if the mesh has it.

        Raises:
          ValueError: if the mesh does not have it.
        """
        if not 0 <= rank < self.mpmd_dim:
            raise ValueError(
                f"rank {rank} is not in {self!r}: its ranks along {self.mpmd_axis_name!r} are 0 to {self.mpmd_dim - 1}."
            )
        return int(rank)


class MpmdSharding(NamedSharding):
    """The place of an `MpmdArray`: its ranks, and its partition inside each of them.

    An `MpmdSharding` is the `NamedSharding` of the whole array: over the mesh of its ranks, replicated along the ranks'
    axis. So `jax.device_put`, `jax.ShapeDtypeStruct` and checkpoint libraries accept it like any sharding. That mesh
    has each device once: it leaves out a rank if an earlier rank has some of its devices.

    Args:
      mpmd_mesh: the mesh of all ranks.
      mesh_ids: the ranks, in any order. The empty set is for an argument that no rank reads: then `ranks` is `(0,)`,
        and a value with this sharding is put on rank 0.
      spec: the sharding inside each rank. The axis of the ranks is removed from it.
      memory_kind: as in `NamedSharding`.

    Raises:
      ValueError: if a rank is not in the mesh, or `spec` names an unknown axis.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
      >>> MpmdSharding(mesh, {1}, P(("stage", "data")))
      MpmdSharding(mesh_ids={1}, spec=P('data',), mesh={'stage': 2, 'data': 2})
    """

    mpmd_mesh: MpmdMesh
    mesh_ids: frozenset[int]
    ranks: tuple[int, ...]
    _union_ranks: tuple[int, ...]
    _local: dict[int, NamedSharding]

    def __init__(
        self,
        mpmd_mesh: MpmdMesh,
        mesh_ids: Iterable[int],
        spec: PartitionSpec,
        memory_kind: str | None = None,
    ) -> None:
        given = frozenset(mpmd_mesh.check_rank(rank) for rank in mesh_ids)
        ranks = tuple(sorted(given)) or (0,)
        spec = keep_axes(spec, lambda axis: axis != mpmd_mesh.mpmd_axis_name)
        seen: set[Device] = set()
        union_ranks: list[int] = []
        for rank in ranks:
            devices = mpmd_mesh.rank_devices(rank)
            if seen.isdisjoint(devices):
                union_ranks.append(rank)
                seen.update(devices)
        super().__init__(mpmd_mesh.mpmd_submesh(union_ranks).jax_mesh, spec, memory_kind=memory_kind)
        self.mpmd_mesh = mpmd_mesh
        self.mesh_ids = given
        self.ranks = ranks
        self._union_ranks = tuple(union_ranks)
        self._local = {}

    @property
    def sharding(self) -> NamedSharding:
        """The plain `NamedSharding` over the mesh of the ranks, as NVIDIA's JaxPP names it."""
        return NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind)

    def on_ranks(self, mesh_ids: Iterable[int]) -> MpmdSharding:
        """Return the same sharding with other ranks."""
        return type(self)(self.mpmd_mesh, mesh_ids, self.spec, self.memory_kind)

    def local_sharding(self, rank: int) -> NamedSharding:
        """Return the sharding of a replica on `rank`, over that rank's submesh; `rank` may be any rank of the mesh."""
        sharding = self._local.get(rank)
        if sharding is None:
            mesh = self.mpmd_mesh.unstack[self.mpmd_mesh.check_rank(rank)]
            sharding = self._local[rank] = NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)
        return sharding

    def __eq__(self, other: object) -> bool:
        # With a device on several ranks, different ranks may span equal meshes.
        if isinstance(other, MpmdSharding) and (self.mesh_ids, self.mpmd_mesh) != (other.mesh_ids, other.mpmd_mesh):
            return False
        return super().__eq__(other)

    __hash__ = NamedSharding.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.mpmd_mesh, self.mesh_ids, self.spec, self.memory_kind))

    def __repr__(self) -> str:
        ranks = "{" + ", ".join(map(str, sorted(self.mesh_ids))) + "}"
        kind = "" if named_memory(self) is None else f", memory_kind={self.memory_kind!r}"
        return f"MpmdSharding(mesh_ids={ranks}, spec={self.spec}, mesh={dict(self.mpmd_mesh.jax_mesh.shape)}{kind})"


def keep_axes(spec: PartitionSpec, keep: Callable[[str], bool]) -> PartitionSpec:
    """Return `spec` without the mesh axes that are not to be kept.

    Example:
      >>> keep_axes(PartitionSpec(("stage", "data"), "stage"), {"data"}.__contains__)
      P('data', None)
    """
    entries = (tuple(filter(keep, axes_in((entry,)))) for entry in spec.partitions)
    unreduced, reduced = (frozenset(filter(keep, axes)) for axes in (spec.unreduced, spec.reduced))
    return with_sums(entries, unreduced, reduced, spec)


def with_sums(entries: Iterable[Any], unreduced: Set[str], reduced: Set[str], like: PartitionSpec) -> PartitionSpec:
    """Return a spec with JAX's types of sums over some axes, of the kind (sum, maximum) that `like` has."""
    kind = getattr(like, "unreduced_kind", None) if unreduced else None  # JAX 0.10 has sums alone
    options: dict[str, Any] = {} if kind is None else {"unreduced_kind": kind}
    return PartitionSpec(*entries, unreduced=frozenset(unreduced), reduced=frozenset(reduced), **options)


def carried_over(spec: PartitionSpec, mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    """Return `spec` without the axes that `mesh` lacks, or that do not divide the dimension."""
    entries: list[Any] = []
    for entry, size in zip(spec.partitions, shape, strict=False):
        kept: list[str] = []
        shards = 1
        for name in entry if isinstance(entry, tuple) else (entry,):
            if name in mesh.shape and size % (shards * mesh.shape[name]) == 0:
                kept.append(name)
                shards *= mesh.shape[name]
        entries.append(tuple(kept) or None)
    return canonical(with_sums(entries, spec.unreduced, spec.reduced, spec))


def named_memory(sharding: Any) -> str | None:
    """Return the kind of memory that a sharding names; None for device memory, named or not, and for no sharding.

    Example:
      >>> named_memory(jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")) is None
      True
    """
    kind = getattr(sharding, "memory_kind", None)
    return None if kind == "device" else kind


def lies_alike(sharding: Any, other: Any) -> bool:
    """Return whether two shardings are equal; one may name device memory while the other names no memory."""
    if sharding == other:
        return True
    if not (isinstance(sharding, NamedSharding) and isinstance(other, NamedSharding)):
        return False
    same = sharding.mesh == other.mesh and sharding.spec == other.spec
    return same and named_memory(sharding) == named_memory(other)


def axes_in(spec: Iterable[Any]) -> list[str]:
    """Return the mesh axes that a PartitionSpec names, in its order.

    Example:
      >>> axes_in(PartitionSpec(None, ("data", "tensor")))
      ['data', 'tensor']
    """
    # A spec with `reduced` or `unreduced` axes cannot be iterated.
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in getattr(spec, "partitions", spec))
    return [name for names in entries for name in names if name is not None]


def entry_of(names: Iterable[str]) -> Any:
    """Return the entry of a PartitionSpec that names some mesh axes.

    Example:
      >>> entry_of(["data", "tensor"]), entry_of(["data"]), entry_of([])
      (('data', 'tensor'), 'data', None)
    """
    axes = tuple(names)
    return axes if len(axes) > 1 else next(iter(axes), None)


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """Write a partition in one standard way, for comparing: without trailing None."""
    entries = list(spec.partitions)
    while entries and not entries[-1]:
        entries.pop()
    return with_sums(entries, spec.unreduced, spec.reduced, spec)
