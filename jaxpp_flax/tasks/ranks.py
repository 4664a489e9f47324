"""The rank that the mesh of a sharding names, and the sharding there in a standard form."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.memory_kinds import memory_wanted
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, canonical

__all__ = ["on_rank", "placed", "rank_of"]


def rank_of(whole: MpmdMesh, mesh: Any, where: str) -> int:
    """Return the rank whose submesh is `mesh`; `where` names the sharding in the message.

    Raises:
      ValueError: if no rank has these devices under these axes.
    """
    if isinstance(mesh, Mesh) and mesh.axis_names == whole.jax_mesh.axis_names:
        for rank, own in enumerate(whole.unstack):
            if np.array_equal(own.devices, mesh.devices):
                return rank
    devices = [d.id for d in mesh.devices.flat] if isinstance(mesh, Mesh) else "no devices"
    raise ValueError(
        f"{where} is over a mesh that is no rank of {whole!r}: its axes are {dict(mesh.shape)}, its devices "
        f"{devices}; rank 0 has the devices {[d.id for d in whole.rank_devices(0)]}. Write "
        "`NamedSharding(mpmd_mesh.unstack[rank], spec)`."
    )


def on_rank(whole: MpmdMesh, sharding: Any, where: str) -> tuple[int, NamedSharding]:
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
    rank = rank_of(whole, sharding.mesh, where)
    return rank, placed(whole, rank, sharding.spec, sharding, where)


def placed(whole: MpmdMesh, rank: int, spec: PartitionSpec, memory: Any, where: str) -> NamedSharding:
    """Return the sharding of a value on a rank, in the memory that another sharding names."""
    kind = memory_wanted(memory, where)
    return NamedSharding(whole.unstack[rank], canonical(spec), memory_kind=None if kind == "device" else kind)
