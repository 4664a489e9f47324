"""The specs that processes tell one another: how XLA partitioned the results of the tasks that they compile.

Only the processes of a task's rank compile the task, but its readers need the shardings of its results. On ranks of one
device there is nothing to tell.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["SharedSpecs", "decode_specs", "encode_specs"]


@dataclass(frozen=True)
class SharedSpecs:
    """Publishes and fetches the specs of tasks' results.

    Args:
      group: the processes.
      mesh: tells which processes own a rank.
      name: the program's unique name, the same on all processes.
      timeout_s: the limit of a wait for another process's compilation.
    """

    group: ProcessGroup
    mesh: MpmdMesh
    name: str
    timeout_s: float
    _known: dict[int, tuple[PartitionSpec, ...]] = field(default_factory=dict)

    def publish(self, program: Program, task: int, specs: Sequence[PartitionSpec]) -> None:
        """Tell the other processes, if this process speaks for the task's rank."""
        rank = program.tasks[task].rank
        if self.mesh.unstack[rank].size > 1 and self._speaker(rank) == self.group.process_index:
            self.group.values.publish(f"{self.name}/specs/{task}", encode_specs(specs))

    def of(self, program: Program, task: int) -> tuple[PartitionSpec, ...]:
        """Return the result specs of a task that another process compiles; wait for its compilation."""
        found = self._known.get(task)
        if found is None:
            described = program.tasks[task]
            if self.mesh.unstack[described.rank].size == 1:
                found = (PartitionSpec(),) * len(described.graph.outputs)
            else:
                what = f"how XLA partitioned the results of task {described.name}"
                speaker = self._speaker(described.rank)
                found = decode_specs(
                    self.group.values.fetch(f"{self.name}/specs/{task}", what, speaker, self.timeout_s)
                )
            self._known[task] = found
        return found

    def _speaker(self, rank: int) -> int:
        return min(device.process_index for device in self.mesh.rank_devices(rank))


def encode_specs(specs: Sequence[PartitionSpec]) -> bytes:
    """Write specs as JSON.

    Example:
      >>> encode_specs([PartitionSpec("data", None), PartitionSpec(("a", "b"))])
      b'[["data", null], [["a", "b"]]]'
    """
    return json.dumps([[list(e) if isinstance(e, tuple) else e for e in spec] for spec in specs]).encode()


def decode_specs(data: bytes) -> tuple[PartitionSpec, ...]:
    """Invert `encode_specs`.

    Example:
      >>> decode_specs(b'[["data", null], [["a", "b"]]]')
      (P('data', None), P(('a', 'b'),))
    """
    entries: list[list[Any]] = json.loads(data)
    return tuple(PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec)) for spec in entries)
