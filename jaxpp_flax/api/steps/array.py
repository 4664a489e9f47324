"""The functions that move trees of arrays, with the parameters of JaxPP's."""

from __future__ import annotations

from typing import Any

from jaxpp_flax.engine.runtime import reshard

__all__ = ["mpmd_to_spmd_reshard", "spmd_to_mpmd_reshard"]


def spmd_to_mpmd_reshard(
    mpmd_mesh: Any, spmd_arrays: Any, mpmd_shardings: Any, threshold: int | None = None, *, donate: bool = True
) -> Any:
    """Move a tree of arrays onto the ranks that their shardings name, as `jaxpp_flax.spmd_to_mpmd_reshard` does.

    `threshold` is ignored: leaves are moved one after another, so one leaf at a time is in flight.

    Example:
      >>> import jax, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> unread = jaxpp.MpmdSharding(mesh, (), jax.sharding.PartitionSpec())
      >>> spmd_to_mpmd_reshard(mesh, np.ones(3), unread).mpmd_idxs
      (0,)
    """
    return reshard.spmd_to_mpmd_reshard(mpmd_mesh, spmd_arrays, mpmd_shardings, donate=donate)


def mpmd_to_spmd_reshard(
    mpmd_mesh: Any, mpmd_arrays: Any, spmd_shardings: Any, threshold: int | None = None, *, donate: bool = True
) -> Any:
    """Move a tree of `MpmdArray`s to ordinary arrays, as `jaxpp_flax.mpmd_to_spmd_reshard` does.

    `threshold` is ignored, as in `spmd_to_mpmd_reshard`.

    Example:
      >>> import jax, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> x = spmd_to_mpmd_reshard(mesh, np.ones(3), jaxpp.MpmdSharding(mesh, {1}, jax.sharding.PartitionSpec()))
      >>> mpmd_to_spmd_reshard(mesh, x, jax.sharding.SingleDeviceSharding(jax.devices()[0])).tolist()
      [1.0, 1.0, 1.0]
    """
    return reshard.mpmd_to_spmd_reshard(mpmd_mesh, mpmd_arrays, spmd_shardings, donate=donate)
