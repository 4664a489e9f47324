"""The meshes on which tasks run, numbered: the submesh of each rank of an `MpmdMesh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.layouts import memory_wanted
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, RankMeshes, canonical

__all__ = ["TaskMeshes"]


@dataclass(frozen=True, eq=False)
class TaskMeshes(RankMeshes):
    """The ranks of an `MpmdMesh`, found by their submeshes."""

    mpmd_mesh: MpmdMesh

    @cached_property
    def unstack(self) -> Sequence[Mesh]:
        """The submesh of each rank."""
        return self.mpmd_mesh.unstack

    def rank_of(self, mesh: Any, where: str) -> int:
        """Return the rank whose submesh is `mesh`; `where` names the sharding in the message.

        Raises:
          ValueError: if no rank has these devices under these axes.
        """
        for rank, own in enumerate(self.unstack):
            same = isinstance(mesh, Mesh) and mesh.axis_names == own.axis_names and mesh.shape == own.shape
            if same and tuple(mesh.devices.flat) == self.rank_devices(rank):
                return rank
        devices = [d.id for d in mesh.devices.flat] if isinstance(mesh, Mesh) else "no devices"
        raise ValueError(
            f"{where} is over a mesh that is no rank of {self.mpmd_mesh!r}: its axes are {dict(mesh.shape)}, its "
            f"devices {devices}; rank 0 has the devices {[d.id for d in self.rank_devices(0)]}. Write "
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
