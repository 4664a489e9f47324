"""`MpmdArray` with the equality of JaxPP's, and the functions that move trees of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax

from jaxpp_flax.engine.arrays import mpmd_array
from jaxpp_flax.engine.runtime import reshard

__all__ = ["MpmdArray", "as_jaxpp", "mpmd_to_spmd_reshard", "spmd_to_mpmd_reshard"]


class MpmdArray(mpmd_array.MpmdArray):
    """The engine's `MpmdArray` with JaxPP's equality: an array is equal only to itself. The arguments are the same.

    So arrays may be keys of a dict and members of a set. `jnp.equal(x, y)` compares elements.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> place = jaxpp.MpmdSharding(mesh, {1}, jax.sharding.PartitionSpec())
      >>> x = MpmdArray([jax.device_put(jnp.arange(3), place.local_sharding(1))], place)
      >>> x == x, x == np.arange(3), {x: "a key"}[x]
      (True, False, 'a key')
      >>> list(x._partially_addressable_arrays)
      [1]
    """

    __slots__ = ()

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    _partially_addressable_arrays = property(lambda self: OrderedDict(self._parts))


def as_jaxpp(leaf: Any) -> Any:
    """Return an array of the engine as one of this front, with the same replicas; other values stay as they are."""
    if isinstance(leaf, MpmdArray) or not isinstance(leaf, mpmd_array.MpmdArray):
        return leaf
    return MpmdArray._from_parts(leaf.sharding, leaf._parts, leaf.aval)  # pyright: ignore[reportPrivateUsage]


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
    moved = reshard.spmd_to_mpmd_reshard(mpmd_mesh, spmd_arrays, mpmd_shardings, donate=donate)
    return jax.tree.map(as_jaxpp, moved)


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
