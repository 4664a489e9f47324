"""The meshes on which tasks run, numbered: the submesh of each rank of an `MpmdMesh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.memory_kinds import memory_wanted
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, RankMeshes, canonical

__all__ = ["TaskMeshes"]


@dataclass(frozen=True, eq=False)
class TaskMeshes(RankMeshes):
    """The ranks of an `MpmdMesh`, and behind them groups of ranks on which a task runs as one program.

    To the engine a group is one more rank, on devices that other ranks use as well. A trace adds the groups that it
    meets; `frozen` gives the meshes of a finished trace.
    """

    mpmd_mesh: MpmdMesh
    groups: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    @property
    def unstack(self) -> Sequence[Mesh]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The submesh of each rank, then the mesh of each group."""
        return [*self.mpmd_mesh.unstack, *(self.mpmd_mesh.mpmd_submesh(group).jax_mesh for group in self.groups)]

    def frozen(self) -> TaskMeshes:
        """Return the same meshes, for a program."""
        return TaskMeshes(self.mpmd_mesh, list(self.groups))

    def ranks_in(self, place: int) -> tuple[int, ...]:
        """Return the ranks of a place: itself, or the ranks of a group."""
        count = self.mpmd_mesh.mpmd_dim
        return (place,) if place < count else self.groups[place - count]

    def group(self, ranks: Sequence[int]) -> int:
        """Return the place of some ranks together."""
        if len(ranks) == 1:
            return ranks[0]
        if tuple(ranks) not in self.groups:
            self.groups.append(tuple(ranks))
        return self.mpmd_mesh.mpmd_dim + self.groups.index(tuple(ranks))

    def name(self, place: int) -> str:
        """Return the name of a place in text: `rank 1`, or `ranks 0+1`."""
        ranks = self.ranks_in(place)
        return f"rank{'s' * (len(ranks) > 1)} {'+'.join(map(str, ranks))}"

    def rank_of(self, mesh: Any, where: str) -> int:
        """Return the rank or the group whose mesh is `mesh`; `where` names the sharding in the message.

        Raises:
          ValueError: if no ranks have these devices under these axes.
        """
        whole = self.mpmd_mesh
        if isinstance(mesh, Mesh) and mesh.axis_names == whole.jax_mesh.axis_names:
            parts = np.moveaxis(mesh.devices, whole.mpmd_axis, 0)
            own = np.moveaxis(whole.jax_mesh.devices, whole.mpmd_axis, 0)
            found = [next((r for r, o in enumerate(own) if np.array_equal(o, part)), None) for part in parts]
            ranks = [rank for rank in found if rank is not None]
            if len(set(ranks)) == len(found):
                return self.group(ranks)
        devices = [d.id for d in mesh.devices.flat] if isinstance(mesh, Mesh) else "no devices"
        raise ValueError(
            f"{where} is over a mesh that is no rank of {whole!r}: its axes are {dict(mesh.shape)}, its devices "
            f"{devices}; rank 0 has the devices {[d.id for d in whole.rank_devices(0)]}. Write "
            "`NamedSharding(mpmd_mesh.unstack[rank], spec)`."
        )

    def on_rank(self, sharding: Any, where: str) -> tuple[int, NamedSharding]:
        """Return the rank of a sharding, and the sharding over the submesh of that rank, in a standard form.

        Raises:
          TypeError: if it is no `NamedSharding`.
          ValueError: if its mesh is no rank's, or no type of JAX can express its kind of memory.
        """
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"{where} must be a NamedSharding, got {type(sharding).__name__}: {sharding!r}. Its mesh tells the "
                "rank: write `NamedSharding(mpmd_mesh.unstack[rank], spec)`."
            )
        return (rank := self.rank_of(sharding.mesh, where)), self.placed(rank, sharding.spec, sharding, where)

    def placed(self, rank: int, spec: PartitionSpec, memory: Any, where: str) -> NamedSharding:
        """Return the sharding of a value on a rank, in the memory that another sharding names."""
        kind = memory_wanted(memory, where)
        return NamedSharding(self.unstack[rank], canonical(spec), memory_kind=None if kind == "device" else kind)
