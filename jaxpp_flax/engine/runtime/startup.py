"""The start of a program in several processes: they compare the program, compile it, connect, and wait for all."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import RankMeshes
from jaxpp_flax.engine.program.description import describe_program, describe_ranks
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.runtime.transport.base import Parcel
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram, process_connection
from jaxpp_flax.messages import listed
from jaxpp_flax.processes.comparison import compare_hashes, compare_lines, describe_environment, value_text

__all__ = ["SharedSpecs", "compare_programs", "compare_values", "start"]

_REMEDY = (
    "Several processes read it, each its own value. Make it from the same seed and the same files in each, or in one "
    "process, and send it to the others by `jax.experimental.multihost_utils.broadcast_one_to_all`."
)


def compare_programs(
    mesh: RankMeshes,
    program: Program,
    argument_specs: Sequence[PartitionSpec],
    result_specs: Sequence[PartitionSpec | None],
) -> DistributedProgram | None:
    """Compare the programs of all processes before any compilation; return None in a single process.

    Raises:
      ValueError: if the mesh has devices of several processes, or of another one, and none of some process.
      ProgramMismatchError: if the programs differ, or the settings of their compilation; it shows the first difference.
      BarrierTimeoutError, ProcessFailedError: if a process does not arrive.
    """
    owners = sorted(mesh.processes)
    if owners == [jax.process_index()]:
        return None
    if absent := sorted({*range(jax.process_count())} - mesh.processes):  # all are told: nobody waits for these
        raise ValueError(
            f"{mesh!r} has no device of process {listed(absent)}: all are of {owners} of {jax.process_count()} "
            "processes. Every process of a run takes part in its steps: give each of them devices."
        )
    connection = process_connection()
    title = f"program {connection.next_program()}"
    # Settings first: if they differ, the program mostly differs too, but its difference tells the user less.
    described = [*describe_ranks(mesh), *describe_program(program, argument_specs, result_specs)]
    lines = [*describe_environment(), *described]
    digest = compare_lines(connection.group, title, lines, connection.settings.start_timeout)
    return DistributedProgram(connection, title, f"{title.replace(' ', '-')}-{digest}")


def start(distributed: DistributedProgram, parcels: Sequence[Parcel], constants: Mapping[str, Any]) -> None:
    """Connect for the parcels of this process, wait until every process has compiled its tasks and has connected too.

    Then compare the constants, the arrays that the step closes over, by name: each process has made its own.
    """
    connection = distributed.connection
    connection.connect(parcels)
    connection.group.barrier(f"the start of {distributed.title}", connection.settings.start_timeout)
    # After the barrier, because this comparison has no deadline.
    compare_values(distributed, "the constants", constants)


def compare_values(distributed: DistributedProgram, what: str, values: Mapping[str, Any]) -> None:
    """Check that each process has made equal values, for values that several processes read.

    The values are called `what` together, such as "the arguments"; those of which this process has only a part are left
    out.
    """
    # Also without values: this process may have placed its arrays already, while another one has some to compare.
    hashes = {name: value_text(value) for name, value in values.items()}
    compare_hashes(distributed.connection.group, f"{what} of {distributed.title}", hashes, _REMEDY)


@dataclass(frozen=True)
class SharedSpecs:
    """The specs that processes tell one another: how XLA partitioned the results of the tasks that they compile.

    Only the processes of a task's rank compile the task, but its readers need the shardings of its results. If every
    rank has one device, there is nothing to tell. Beside larger meshes, a spec on one device matters: it is carried
    over to them.
    """

    distributed: DistributedProgram
    mesh: RankMeshes
    _specs_of: dict[int, tuple[PartitionSpec, ...]] = field(default_factory=dict)

    def publish(self, program: Program, task: int, specs: Sequence[PartitionSpec]) -> None:
        """Tell the other processes, if this process speaks for the task's rank."""
        rank, group = program.tasks[task].rank, self.distributed.connection.group
        if self._matter and self._speaker(rank) == group.process_index:
            group.values.publish(self._key(task), repr([tuple(spec) for spec in specs]).encode())

    def of(self, program: Program, task: int) -> tuple[PartitionSpec, ...]:
        """Return the result specs of a task that another process compiles; wait for its compilation."""
        specs = self._specs_of.get(task)
        if specs is None:
            described = program.tasks[task]
            if not self._matter:
                specs = (PartitionSpec(),) * len(described.graph.outputs)
            else:
                what = f"how XLA partitioned the results of task {described.name}"
                connection, speaker = self.distributed.connection, self._speaker(described.rank)
                timeout_s = connection.settings.start_timeout
                text = connection.group.values.fetch(self._key(task), what, speaker, timeout_s).decode()
                specs = tuple(PartitionSpec(*entries) for entries in ast.literal_eval(text))
            self._specs_of[task] = specs
        return specs

    @cached_property
    def _matter(self) -> bool:
        return any(mesh.size > 1 for mesh in self.mesh.unstack)

    def _key(self, task: int) -> str:
        return f"{self.distributed.name}/specs/{task}"

    def _speaker(self, rank: int) -> int:
        return min(self.mesh.rank_processes[rank])
