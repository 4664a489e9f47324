"""The instruction loop: runs a compiled program over an environment: a list with a place for each value.

It never waits for a result; it waits for the end of an offload only where a `ResidualPlan` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat import copy_arrays
from jaxpp_flax.engine.arrays.placing import place, to_memory
from jaxpp_flax.engine.program.program import HOST_MEMORY, Instruction, Program, Run, Transfer, Wait
from jaxpp_flax.engine.runtime.debug_switches import watched
from jaxpp_flax.engine.runtime.executables import Executables
from jaxpp_flax.engine.runtime.profile import (
    TaskTiming,
    Times,
    collect,
    gathered,
    is_collecting,
    timed,
    timeline,
)
from jaxpp_flax.engine.runtime.transport.base import Parcel
from jaxpp_flax.engine.runtime.transport.credits import Credits
from jaxpp_flax.engine.runtime.transport.routes import SentLeaf, plan
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["Runtime"]

Environment = list[Any]
Step = Callable[[Environment], None]


class Runtime:
    """A program bound to its executables; `run` is called once per step.

    Each instruction becomes one function bound to plain integers, so that a step evaluates nothing but calls, copies
    and list accesses. With several processes, only instructions of this process's ranks become functions.
    """

    def __init__(self, executables: Executables) -> None:
        program, mesh, distributed = executables.program, executables.mesh, executables.distributed
        self.program = program
        self.parcels: list[Parcel] = []  # what this process sends and receives in a step
        self._moved: list[tuple[int, list[Parcel]]] = []  # by transfers' numbers: the parcels that this process walks
        self._distributed = distributed
        self._calls = 0
        self._mesh, self._executables = mesh, executables
        if distributed is not None:
            _refuse_other_memory(program, executables)
        # Microbatches share what is worked out for an edge.
        self._shardings_of, self._route_of = cache(_shardings), cache(plan)
        local = set(mesh.local_ranks)
        bound = [self._bind(number, instr, local) for number, instr in enumerate(program.instructions)]
        if distributed is not None:
            in_global_order = distributed.connection.transport.needs_global_order
            self._credits = Credits.of(self._moved, jax.process_index(), in_global_order=in_global_order)
            self.parcels += self._credits.parcels
            before, group = distributed.connection.window.before_task, distributed.connection.group
            bound = [
                partial(_begin, before, group, partial(_begun, group, program.task_text(instruction)), step)
                if isinstance(instruction, Run) and step is not None
                else step
                for instruction, step in zip(program.instructions, bound, strict=True)
            ]
        self._steps = bound
        self._indices = self._place_indices(local)

    def _place_indices(self, local: set[int]) -> dict[int, jax.Array]:
        """Put the microbatch indices as scalars on each rank's devices, once: no step pays for it."""
        indices = {key: value for key, value in self.program.indices.items() if key[0] in local}
        # NumPy's numbers: with those of JAX, `jax.transfer_guard("disallow")` would refuse the first step.
        scalar = {microbatch: np.int32(microbatch) for _, microbatch in indices}
        on_rank = {rank: NamedSharding(self._mesh.unstack[rank], PartitionSpec()) for rank, _ in indices}
        return {value: place(scalar[m], on_rank[rank]) for (rank, m), value in indices.items()}

    def _bind(self, number: int, instruction: Instruction, local: set[int]) -> Step | None:
        if isinstance(instruction, Transfer):
            return self._bind_any_transfer(number, instruction, local)
        if instruction.rank not in local:
            return None
        if isinstance(instruction, Run):
            executable = self._executables.variants.get(number, self._executables.tasks[instruction.task])
            donated = self.program.taken_over(instruction)
            return partial(_run, executable, instruction.inputs, instruction.outputs, donated)
        if isinstance(instruction, Wait):
            return partial(_wait, instruction.copies)
        return partial(_free, instruction.values, instruction.delete)

    def _bind_any_transfer(self, number: int, instruction: Transfer, local: set[int]) -> Step | None:
        if instruction.memory is not None:
            return self._bind_memory_copy(instruction) if instruction.source in local else None
        source, target = self._mesh.unstack[instruction.source], self._mesh.unstack[instruction.target]
        types = [self._executables.held[value].aval for value in instruction.sent]
        memories = tuple(map(memory_kind_of, types))
        shardings = self._shardings_of(target, self._specs(instruction.received), memories)
        is_local = {instruction.source, instruction.target} <= local
        if self._distributed is None or (is_local and not (source.is_multi_process or target.is_multi_process)):
            return partial(_copy, copy_arrays, instruction.sent, instruction.received, shardings)
        distributed, connection = self._distributed, self._distributed.connection
        concerned = not local.isdisjoint((instruction.source, instruction.target))
        if not concerned and not connection.transport.needs_global_order:
            return None
        origins = self._shardings_of(source, self._specs(instruction.sent), memories)
        leaves = tuple(
            SentLeaf(tuple(aval.shape), aval.dtype, origin, sharding)
            for aval, origin, sharding in zip(types, origins, shardings, strict=True)
        )
        route = self._route_of(leaves, jax.process_index())
        self.parcels += route.own_parcels()
        walked = route.walked(connection.transport.needs_global_order)
        self._moved.append((number, [parcel for parcel, _ in walked]))
        # Other code may donate or delete arguments and results.
        private = [value in self.program.preset or value in self.program.returned for value in instruction.sent]
        what = _awaited(self.program, instruction)
        sent = instruction.sent if instruction.source in local else (None,) * len(leaves)

        def step(environment: Environment) -> None:
            arrays = [None if value is None else environment[value] for value in sent]
            self._credits.wait(number, distributed, self._calls)
            arrived = route.move(connection, arrays, private, distributed.tag(number, self._calls, what))
            for value, array in zip(instruction.received, arrived, strict=True):
                environment[value] = array
            self._credits.sign(number, distributed, self._calls)

        return step

    def _specs(self, values: Iterable[int]) -> tuple[PartitionSpec, ...]:
        return tuple([self._executables.held[value].spec for value in values])

    def _bind_memory_copy(self, instruction: Transfer) -> Step:
        memory = HOST_MEMORY if instruction.memory == HOST_MEMORY else None  # None is the devices' own
        specs = self._specs(instruction.received)
        shardings = self._shardings_of(self._mesh.unstack[instruction.target], specs, (memory,) * len(specs))
        return partial(_copy, to_memory, instruction.sent, instruction.received, shardings)

    def run(self, environment: Environment) -> None:
        """Run one step; `environment` holds the arguments in their places and receives the results in theirs.

        Raises:
          FloatingPointError: if a result holds a value that `jax.debug_nans` or `jax.debug_infs` look for.
        """
        if is_collecting():
            collect(self.program, self._run_timed(environment))
        else:
            self._run(environment)

    def profile(self, environment: Environment) -> list[TaskTiming]:
        """Run one step as `run` does, waiting for each instruction; return the timeline of the loop's tasks.

        With several processes, each one measures its own ranks, and all return the times of all ranks.

        Raises:
          FloatingPointError: as `run`; the checks then count as time of the tasks.
        """
        times = self._run_timed(environment)
        if self._distributed is not None:
            times = gathered(times, self._distributed.connection.group)
        return timeline(self.program, times)

    def _run_timed(self, environment: Environment) -> Times:
        times: Times = {}
        self._run(environment, times)
        return times

    def _run(self, environment: Environment, times: Times | None = None) -> None:
        self._calls += 1
        if self._distributed is not None:
            group = self._distributed.connection.group
            group.runs += 1
            group.begun_step = self._calls if group.step is None else group.step
        for value, index in self._indices.items():
            environment[value] = index
        # The arguments are in place, and some are donated: no guard may end the step halfway and lose them. The own
        # copies of a pipeline are its work, as collectives are that of one compiled program, which no guard sees.
        with jax.transfer_guard("allow"), watched(self.program, self._steps, environment) as steps:
            for step in steps if times is None else timed(self.program, steps, times):
                if step is not None:
                    step(environment)


# `partial` of these functions makes the steps: a closure is five objects to the garbage collector, a partial two.


def _run(
    executable: Any,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    donated: tuple[int, ...],
    environment: Environment,
) -> None:
    results = executable(*[environment[value] for value in inputs])
    for value, result in zip(outputs, results, strict=True):
        environment[value] = result
    for value in donated:  # the executable may have had no use for the memory
        environment[value] = None


def _begin(
    before: Callable[[], None], group: ProcessGroup, begun: Callable[[], str], step: Step, environment: Environment
) -> None:
    before()
    group.begun = begun
    step(environment)


def _begun(group: ProcessGroup, task: str) -> str:
    """A task that this process began, in words; no program, which would live as long as the group."""
    return f"{task} in step {group.begun_step}"


def _copy(
    copy_all: Callable[[Sequence[jax.Array], Sequence[NamedSharding]], Sequence[jax.Array]],
    sent: Sequence[int],
    received: Sequence[int],
    shardings: Sequence[NamedSharding],
    environment: Environment,
) -> None:
    for value, copy in zip(received, copy_all([environment[v] for v in sent], shardings), strict=True):
        environment[value] = copy


def _shardings(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], memories: tuple[str | None, ...]
) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, spec, memory_kind=kind) for spec, kind in zip(specs, memories, strict=True))


def _free(values: tuple[int, ...], delete: tuple[int, ...], environment: Environment) -> None:
    for value in delete:
        environment[value].delete()
    for value in values:
        environment[value] = None


def _wait(copies: tuple[int, ...], environment: Environment) -> None:
    # An offload depends on earlier instructions of the global order only, and these are dispatched: no deadlock.
    for value in copies:
        environment[value].block_until_ready()


def _refuse_other_memory(program: Program, executables: Executables) -> None:
    """Refuse to send a value between processes unless it is in device memory; every process refuses alike."""
    for transfer in program.instructions:
        if not isinstance(transfer, Transfer) or transfer.memory is not None:
            continue
        for value in transfer.sent:
            aval = executables.held[value].aval
            if (kind := memory_kind_of(aval)) is not None:
                raise ValueError(
                    f"a value {aval.dtype}{list(aval.shape)} in {kind!r} memory goes from rank {transfer.source} to "
                    f"rank {transfer.target}, and with several processes only what is in the devices' own memory is "
                    "sent. Move it there in the stage that sends it: `jax.device_put(x, jax.memory.Space.Device)`."
                )


def _awaited(program: Program, transfer: Transfer) -> str:
    """Describe the purpose of the target's wait: the next task that reads the values."""
    readers = [program.readers[value][0] for value in transfer.received if value in program.readers]
    purpose = "a result of the step"
    if readers:
        run = program.instructions[readers[0]]
        purpose = "a later task"
        if isinstance(run, Run):
            task = program.tasks[run.task]
            stage = "" if task.stage is None else f" (stage {task.stage}, microbatch {run.microbatch})"
            purpose = f"task {task.name}{stage}"
    return f"rank {transfer.target}: what {purpose} needs of rank {transfer.source}"
