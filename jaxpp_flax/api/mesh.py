"""`MpmdMesh` with the names by which JaxPP's programs find ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp_flax.engine.arrays import mesh as engine

__all__ = ["MpmdMesh"]


class MpmdMesh(engine.MpmdMesh):
    """`jaxpp_flax.MpmdMesh` with further names of JaxPP's; the arguments are the same, and equal meshes compare equal.

    Example:
      >>> import jax, numpy as np
      >>> mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("stage",)), "stage")
      >>> mesh.mpmd_indices_for_mesh(mesh.mpmd_submesh([1, 2]).jax_mesh)
      (1, 2)
    """

    mesh_stack: ClassVar[list[MpmdMesh]] = []
    """The meshes of the `with` statements around, the innermost last."""

    def __repr__(self) -> str:
        return f"MpmdMesh(jax_mesh={self.jax_mesh!r}, mpmd_axis_name={self.mpmd_axis_name!r})"

    def __enter__(self) -> MpmdMesh:
        self.mesh_stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.mesh_stack.pop()

    @property
    def as_mpmd_mesh(self) -> MpmdMesh:
        """This mesh itself. In JaxPP's older versions, a mesh of Ray workers gives an ordinary `MpmdMesh` here."""
        return self

    @property
    def device_coords(self) -> Mapping[Any, tuple[int, ...]]:
        """The position of each device in the mesh; the first position if a device belongs to several ranks."""
        return {device: place for place, device in reversed(list(np.ndenumerate(self.jax_mesh.devices)))}

    @property
    def mpmd_idx_for_mesh(self) -> Mapping[Mesh, int]:
        """The rank of each submesh of `unstack`; the first rank if several ranks have the same devices."""
        return {mesh: rank for rank, mesh in reversed(list(enumerate(self.unstack)))}

    @property
    def device_mpmd_idx(self) -> Mapping[Any, int]:
        """The rank of each device; the first rank if a device belongs to several ranks."""
        return {device: rank for rank in reversed(range(self.mpmd_dim)) for device in self.rank_devices(rank)}

    def mpmd_indices_for_mesh(self, mesh: Mesh) -> tuple[int, ...] | None:
        """Return the ranks whose devices make up `mesh`, in ascending order; None if there are no such ranks."""
        devices = set(mesh.devices.flat)
        ranks = [rank for rank in range(self.mpmd_dim) if devices.issuperset(self.rank_devices(rank))]
        covered = {device for rank in ranks for device in self.rank_devices(rank)}
        return tuple(ranks) if ranks and covered == devices else None

    @property
    def my_mpmd_axis_index(self) -> int:
        """This process's only rank.

        Raises:
          ValueError: if the process owns devices of no rank, or of several (as a single process does).
        """
        if len(self.local_ranks) != 1:
            raise ValueError(
                f"process {jax.process_index()} owns devices of the ranks {self.local_ranks} of {self!r}, so it has "
                "no single rank. Use `local_ranks`, or `is_local(rank)` for one of them."
            )
        return self.local_ranks[0]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The submesh of this process's only rank; raises the same error as `my_mpmd_axis_index`."""
        return self.unstack[self.my_mpmd_axis_index]
