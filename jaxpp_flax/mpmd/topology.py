"""Named meshes, of equal or different shapes, on which an MPMD program runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

__all__ = ["Topology", "topology_of"]

# In programs written for Shardy, these suffixes of mesh names give a kind of memory.
_MEMORY_KINDS = ("#pinned_host", "#device")


@dataclass(frozen=True)
class Topology:
    """Meshes in order; their positions are the engine's ranks. A device may belong to several meshes."""

    names: tuple[str, ...]
    meshes: tuple[Mesh, ...]

    @cached_property
    def unstack(self) -> Sequence[Mesh]:
        """The meshes, under the name that the engine uses."""
        return self.meshes

    def rank_devices(self, rank: int) -> tuple[Any, ...]:
        """Return the devices of one mesh, in its order."""
        return tuple(self.unstack[rank].devices.flat)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The meshes with at least one device in this process."""
        process = jax.process_index()
        return tuple(
            rank
            for rank in range(len(self.names))
            if any(device.process_index == process for device in self.rank_devices(rank))
        )

    def rank(self, name: str) -> int:
        """Return the position of a mesh."""
        return self.names.index(name)


def topology_of(meshes: Mapping[str, Mesh] | None) -> Topology:
    """Check a topology from the user.

    Raises:
      TypeError: if it is not a mapping from names to `jax.sharding.Mesh`.
      ValueError: if it is empty, a name is reserved, or an axis is not of type Auto.
    """
    if not meshes:
        raise ValueError(
            f"topology must name at least one mesh, got {meshes!r}. "
            'Pass e.g. `{"m0": Mesh(devices[:2], ("data",)), "m1": Mesh(devices[2:], ("data",))}`.'
        )
    if not isinstance(meshes, Mapping):
        raise TypeError(
            f"topology must be a mapping from names to meshes, got {type(meshes).__name__}. "
            'Pass e.g. `{"m0": mesh_0, "m1": mesh_1}`.'
        )
    for name, mesh in meshes.items():
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"topology[{name!r}] must be a jax.sharding.Mesh, got {type(mesh).__name__}. "
                'Build one: `Mesh(np.array(devices), ("data",))`.'
            )
        if "@" in name or name.endswith(_MEMORY_KINDS):
            raise ValueError(
                f"a mesh cannot be named {name!r}: '@' and the endings {', '.join(_MEMORY_KINDS)} are reserved. "
                "Rename it."
            )
        other = [f"{axis}: {kind.name}" for axis, kind in _axis_types(mesh) if kind is not AxisType.Auto]
        if other:
            raise ValueError(
                f"topology[{name!r}] has axes that are not Auto ({', '.join(other)}): their shardings are part of the "
                "arrays' types, which do not change from mesh to mesh. Build the mesh with Auto axes."
            )
    return Topology(tuple(meshes), tuple(meshes.values()))


def _axis_types(mesh: Mesh) -> Sequence[tuple[Any, AxisType]]:
    return list(zip(mesh.axis_names, mesh.axis_types, strict=True))
