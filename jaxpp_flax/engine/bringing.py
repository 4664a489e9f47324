"""Arguments to ranks that do not have them, where another process does: state after a change of schedule, mostly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpp_flax.engine.array import MpmdArray
from jaxpp_flax.engine.runtime import Across
from jaxpp_flax.engine.transport.base import Tag
from jaxpp_flax.engine.transport.crossing import Crossing
from jaxpp_flax.engine.transport.routes import Leaf, plan

__all__ = ["bring"]


def bring(leaf: MpmdArray, wanted: Iterable[int], across: Across, call: int, argument: int) -> dict[int, jax.Array]:
    """Replicas of `leaf` on those of its wanted ranks that lack one, as far as they are this process's.

    Every process calls it with the same array at the same point, as all of them know where the array lives. Connections
    to new peers are opened on the way.

    Args:
      leaf: the argument.
      wanted: the ranks that read it.
      across: this process's link.
      call: counts the calls of the step.
      argument: its position.
    """
    mesh, source = leaf.sharding.mpmd_mesh, leaf.mpmd_idxs[0]
    parts: dict[int, Any] = {}
    for rank in sorted(set(wanted) - set(leaf.mpmd_idxs)):
        target = NamedSharding(mesh.unstack[rank], leaf.spec)
        described = Leaf(leaf.shape, leaf.dtype, leaf.sharding.local_sharding(source), target)
        what = f"rank {rank}: argument {argument} of the step, which rank {source} has"
        route = plan([described], jax.process_index(), what)
        across.link.connect(route.own_parcels())
        part = leaf._partially_addressable_arrays.get(source)  # pyright: ignore[reportPrivateUsage]
        tag = Tag(f"{across.name}/argument-{argument}-to-{rank}", call, 0)
        (arrived,) = Crossing(across.link, route, [True])([part], tag)
        if arrived is not None:
            parts[rank] = arrived
    return parts
