"""Copy one array to another sharding: every byte goes straight from a device that has it to the devices that need it.

No host and no device holds more of the array than its part at the source and at the target.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding

from jaxpp_flax._compat import is_described
from jaxpp_flax.engine.arrays.mesh import named_memory
from jaxpp_flax.engine.arrays.placing import to_memory
from jaxpp_flax.engine.runtime.transport.base import Tag
from jaxpp_flax.engine.runtime.transport.connection import Connection
from jaxpp_flax.engine.runtime.transport.routes import Route, SentLeaf, plan

__all__ = ["is_attached", "relayout", "relayout_across"]


def is_attached(device: Any) -> bool:
    """Return whether a device belongs to a process of this job; a described one does not.

    Example:
      >>> is_attached(jax.devices()[0])
      True
    """
    return not is_described(device) and device in jax.devices(device.platform)


def relayout(array: jax.Array, target: Sharding) -> jax.Array:
    """Return a copy with another sharding, whose devices, as those of the array, all belong to this process.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> there = NamedSharding(Mesh(np.array(jax.devices()[1:5]).reshape(2, 2), ("a", "b")), P("b", "a"))
      >>> relayout(jax.numpy.arange(8).reshape(4, 2), there).addressable_shards[1].data.tolist()
      [[4], [6]]
    """
    array, route = _planned(array, target)
    return _in_memory_of(target, route.copied(array))  # type: ignore[return-value]


def relayout_across(
    array: jax.Array, target: Sharding, connection: Connection, tag: Tag, *, waits: bool = True
) -> jax.Array | None:
    """Return a copy with another sharding; None if the sharding has no device of this process.

    Every process calls this at the same point, also one that has no part of the array. Connections to new peers are
    opened on the way. The values travel in device memory. `waits=False` never waits for them.
    """
    array, route = _planned(array, target)
    connection.connect(route.own_parcels())
    if waits:
        copy = route.copied(array, route.exchange(connection, [array], [True], tag))
    else:
        (copy,) = route.move(connection, [array], [True], tag)
    return _in_memory_of(target, copy)


def _planned(array: jax.Array, target: Sharding) -> tuple[jax.Array, Route]:
    if named_memory(array.sharding) is not None:
        (array,) = to_memory([array], [array.sharding.with_memory_kind("device")])
    on_devices = target if named_memory(target) is None else target.with_memory_kind("device")
    leaf = SentLeaf(array.shape, array.dtype, array.sharding, on_devices)
    return array, plan((leaf,), jax.process_index())


def _in_memory_of(target: Sharding, copy: jax.Array | None) -> jax.Array | None:
    return copy if copy is None or named_memory(target) is None else to_memory([copy], [target])[0]
