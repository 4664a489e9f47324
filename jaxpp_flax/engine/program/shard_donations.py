"""The donations of a task that are usable after its inputs and outputs are partitioned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.tracing.ir import Atom, memory_kind_of

__all__ = ["usable_donations"]


def usable_donations(
    task: ProgramTask, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None]
) -> tuple[int, ...]:
    """Return the positions of a task's donated inputs whose memory an output can take over.

    `task.donate` compares whole arrays. If JAX knows all shardings, it compares shards, and warns of each donated shard
    that no output can reuse; otherwise XLA decides.
    """
    if not task.donate or None in out_specs:
        return tuple(sorted(task.donate))

    def kind(atom: Atom, spec: PartitionSpec | None) -> Any:
        shape = NamedSharding(mesh, spec or PartitionSpec()).shard_shape(tuple(atom.aval.shape))
        return shape, atom.aval.dtype, memory_kind_of(atom.aval)

    room = Counter(map(kind, task.graph.outputs, out_specs))
    usable: list[int] = []
    pinned = {position for _, position in task.pins}  # accumulators first: their outputs must take over their memory
    for position in sorted(task.donate, key=lambda position: (position not in pinned, position)):
        input_kind = kind(task.graph.inputs[position], in_specs[position])
        if room[input_kind] > 0:
            room[input_kind] -= 1
            usable.append(position)
    return tuple(sorted(usable))
