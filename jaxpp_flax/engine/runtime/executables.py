"""Executables for a program's tasks, and the shardings of what they read and write.

Shardings inside a submesh are found task by task: a task is compiled with the shardings of its inputs, and XLA chooses
the shardings of its outputs. The next task reads these outputs. Where a rank has one device there is nothing to choose:
its tasks are compiled side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import RankMeshes, canonical, carried_over, spec_on
from jaxpp_flax.engine.program.program import HOST_MEMORY, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.program.specs import initial_spec, specs_wanted, with_own_results
from jaxpp_flax.engine.runtime.startup import SharedSpecs
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler, Waiting
from jaxpp_flax.engine.tracing.ir import memory_kind_of, struct_of

__all__ = ["Executables", "compile_program"]


@dataclass(frozen=True)
class Executables:
    """A program ready to run: an executable for each task, and the sharding of each slot that is written.

    `program` is the given program, with tasks added at its end for results that need another partition. For each
    transfer, `transfer_specs` are the specs of the received values, `source_specs` the specs of the sent values, and
    `transfer_avals` the types. `variants` maps an instruction to its executable, for runs whose inputs have another
    partition than in the task's first run.
    """

    program: Program
    tasks: tuple[Any, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    transfer_specs: dict[int, tuple[PartitionSpec, ...]]
    source_specs: dict[int, tuple[PartitionSpec, ...]]
    transfer_avals: dict[int, tuple[Any, ...]]
    written_bytes: dict[int, tuple[int, ...]]
    variants: dict[int, Any] = field(default_factory=dict[int, Any])


def compile_program(
    program: Program,
    compiler: TaskCompiler[Any],
    argument_specs: Sequence[PartitionSpec],
    result_specs: Sequence[PartitionSpec | None],
    argument_avals: Sequence[Any],
    ranks: Sequence[int],
    shared: SharedSpecs | None = None,
) -> Executables:
    """Compile the tasks of `ranks` in program order, finding shardings on the way.

    Args:
      program: with slots allocated.
      compiler: shared by all programs of one step function, so that identical tasks compile once.
      argument_specs, argument_avals: for each argument of the program.
      result_specs: for each result; `None` keeps the spec that XLA chose.
      ranks: the ranks of this process.
      shared: given if other processes own some ranks: tells how their tasks partition their results.
    """
    walk = _Walk(program, compiler, argument_specs, result_specs, argument_avals, set(ranks), shared)
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            walk.run(number, instruction)
        elif isinstance(instruction, Transfer):
            walk.transfer(number, instruction)
    walk.finish()
    return walk.executables()


@dataclass(frozen=True, eq=False)
class _Held:
    """The contents of a slot; compared by identity.

    One object stands for the slots of all microbatches: runs of a task that read the same objects write the same
    objects. So each run only needs a lookup. `found` is the spec, or a function that returns it: another process may
    still be compiling the task that writes the slot. `rank` is that task's rank, None for an argument of the step.
    """

    found: PartitionSpec | Callable[[], PartitionSpec]
    aval: Any = None
    rank: int | None = None

    @cached_property
    def spec(self) -> PartitionSpec:
        return self.found if isinstance(self.found, PartitionSpec) else self.found()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def local_bytes(self, mesh: RankMeshes) -> int:
        """Return the bytes on each device; 0 for an argument that is passed on, and for a value on the host."""
        if self.rank is None or memory_kind_of(self.aval) is not None:
            return 0
        shape = NamedSharding(mesh.unstack[self.rank], self.spec).shard_shape(self.shape)
        return math.prod(shape) * int(getattr(self.aval.dtype, "itemsize", 0))


_AllHeld: TypeAlias = "tuple[_Held, ...]"
# Of a run: its executable, None on another process's rank; and the contents of its outputs.
_Result: TypeAlias = "tuple[Waiting | None, _AllHeld]"


@dataclass(eq=False)
class _Walk:
    """Goes through a program in order and keeps the contents of each slot."""

    program: Program
    compiler: TaskCompiler[Any]
    argument_specs: Sequence[PartitionSpec]
    result_specs: Sequence[PartitionSpec | None]
    argument_avals: Sequence[Any]
    ranks: set[int]
    shared: SharedSpecs | None
    first: dict[int, _Result] = field(default_factory=dict)  # of each task's first run
    by_specs: dict[tuple[int, tuple[PartitionSpec, ...]], _Result] = field(default_factory=dict)
    by_held: dict[tuple[int, _AllHeld], _Result] = field(default_factory=dict)
    carried: dict[tuple[_Held, int], _Held] = field(default_factory=dict)  # to ranks with meshes of other shapes
    in_other_memory: dict[_Held, _Held] = field(default_factory=dict["_Held", "_Held"])  # offloaded, and back
    sent: dict[int, _AllHeld] = field(default_factory=dict)
    received: dict[int, _AllHeld] = field(default_factory=dict)
    written: dict[int, _AllHeld] = field(default_factory=dict)
    variants: dict[int, Waiting] = field(default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        program = self.program
        self.mesh: RankMeshes = self.compiler.mesh
        self.mesh_shapes = [dict(mesh.shape) for mesh in self.mesh.unstack]
        self.wanted = specs_wanted(program, self.result_specs, self._alike)
        self.held: dict[int, _Held] = dict.fromkeys(program.indices.values(), _Held(PartitionSpec()))
        for slots, spec, aval in zip(program.arguments, self.argument_specs, self.argument_avals, strict=True):
            self.held.update(dict.fromkeys(slots.values(), _Held(spec, aval)))
        self.compiled: list[Waiting | None] = [None] * len(program.tasks)

    def run(self, number: int, run: Run) -> None:
        key = run.task, tuple(map(self.held.__getitem__, run.inputs))
        result = self.by_held.get(key)
        if result is None:
            result = self.by_held[key] = self._result(number, run)
        compiled, made = result
        if compiled is not None and compiled is not self.compiled[run.task]:
            self.variants[number] = compiled
        self.held.update(zip(run.outputs, made, strict=True))
        self.written[number] = made

    def _result(self, number: int, run: Run) -> _Result:
        """Return the result of a run that is unlike all earlier ones."""
        new = run.task not in self.first
        if new:
            self.first[run.task] = self._first_result(number, run)
        first = self.first[run.task]
        if first[0] is None:  # a task of other processes
            return first
        # Within a loop all runs are alike; other programs may read values that were made elsewhere.
        key = run.task, tuple(canonical(self.held[slot].spec) for slot in run.inputs)
        if key not in self.by_specs:
            if new:
                self.by_specs[key] = first
            elif self.shared is None:
                self.by_specs[key] = self._compile(number, run)
            else:  # other processes know the partition of the first run's results only
                self.by_specs[key] = self._compile(number, run, [held.spec for held in first[1]])[0], first[1]
        return self.by_specs[key]

    def _first_result(self, number: int, run: Run) -> _Result:
        program, task, shared = self.program, self.program.tasks[run.task], self.shared
        if shared is not None and task.rank not in self.ranks:
            of_other = partial(_spec_of_other, shared, program, run.task)
            found = task.out_specs or [partial(of_other, i) for i in range(len(task.graph.outputs))]
            return None, _held_after(task, found)
        compiled, made = self._compile(number, run)
        self.compiled[run.task] = compiled
        if shared is not None and not task.out_specs:
            shared.publish(program, run.task, [held.spec for held in made])
        return compiled, made

    def _compile(self, number: int, run: Run, fixed: Sequence[PartitionSpec] = ()) -> _Result:
        """Compile a run's task for the partition of its inputs; `fixed` are the results' specs, if they are known."""
        task = self.program.tasks[run.task]
        in_specs = [self.held[slot].spec for slot in run.inputs]
        wanted = dict(enumerate(fixed)) or self.wanted.get(number, {})
        out_specs = list(task.out_specs) or [wanted.get(i) for i in range(len(task.graph.outputs))]
        if task.batch_dims and not fixed:
            wishes = [None if a is None else self.argument_specs[a] for a in task.like]
            out_specs = [
                s or initial_spec(self.program, number, i, self._spec_held, wishes[i]) for i, s in enumerate(out_specs)
            ]
        for output, source in () if fixed else task.pins:
            out_specs[output] = in_specs[source]
        if not task.graph.inputs:  # then only the outputs' shardings tell XLA the mesh
            out_specs = [s or _spec_in_type(atom.aval) for s, atom in zip(out_specs, task.graph.outputs, strict=True)]
        if task.out_specs:  # XLA's own account leaves out `unreduced` and `reduced`
            return self.compiler.start(task, in_specs, out_specs), _held_after(task, task.out_specs)
        if self.mesh.unstack[task.rank].size == 1:  # nothing is chosen, so nobody waits for XLA
            known = [s or _spec_in_type(atom.aval) for s, atom in zip(out_specs, task.graph.outputs, strict=True)]
            return self.compiler.start(task, in_specs, known), _held_after(task, list(map(canonical, known)))
        started = self.compiler.start(task, in_specs, out_specs)
        specs = _output_specs(started(), task, self.mesh)
        if None in specs:  # no PartitionSpec can say XLA's choice: ask for P() instead
            started = self.compiler.start(task, in_specs, [s or PartitionSpec() for s in specs])
            specs = _output_specs(started(), task, self.mesh)
        return started, _held_after(task, [s or PartitionSpec() for s in specs])

    def _spec_held(self, slot: int) -> PartitionSpec | None:
        return self.held[slot].spec if slot in self.held else None

    def transfer(self, number: int, transfer: Transfer) -> None:
        sent = received = tuple(map(self.held.__getitem__, transfer.sent))
        if transfer.memory is not None:
            self._memory_copy(number, transfer, sent)
            return
        if not self._alike(transfer):
            received = tuple(self._carried_over(held, transfer.target) for held in sent)
        if wanted := self.wanted.get(number):  # P() is no wish here: the sender may keep it partitioned
            received = tuple(
                replace(held, found=wanted[i]) if wanted.get(i) else held for i, held in enumerate(received)
            )
        self.held.update(zip(transfer.received, received, strict=True))
        self.sent[number], self.received[number], self.written[number] = sent, received, sent

    def _memory_copy(self, number: int, transfer: Transfer, sent: _AllHeld) -> None:
        """Note a copy between a rank's memories; a fetched value is again what it was before its offload."""
        other = tuple(self.in_other_memory.get(held) or self._on_host(held) for held in sent)
        self.held.update(zip(transfer.received, other, strict=True))
        self.sent[number], self.received[number] = sent, other
        self.written[number] = sent if transfer.memory == HOST_MEMORY else other

    def _on_host(self, held: _Held) -> _Held:
        host = self.in_other_memory[held] = replace(held)
        self.in_other_memory[host] = held
        return host

    def _alike(self, transfer: Transfer) -> bool:
        """Return whether both ends of a transfer have meshes of one shape; then a spec means the same on both."""
        return self.mesh_shapes[transfer.source] == self.mesh_shapes[transfer.target]

    def _carried_over(self, held: _Held, target: int) -> _Held:
        key = held, target
        if key not in self.carried:
            mesh = self.mesh.unstack[target]
            # Found only when it is read: another process may still compile the task that makes the value.
            self.carried[key] = replace(held, found=lambda: carried_over(held.spec, mesh, held.shape))
        return self.carried[key]

    def finish(self) -> None:
        """Add tasks for the results that need another partition."""
        results, end = self.program.results, len(self.program.instructions)
        wanted = [
            (position, rank)
            for position, (result, spec) in enumerate(zip(results, self.result_specs, strict=True))
            for rank, slot in (result.items() if isinstance(result, dict) else ())
            if not self._is_partitioned(rank, self.held[slot], spec)
        ]
        avals = {results[position][rank]: self.held[results[position][rank]].aval for position, rank in wanted}
        self.program = with_own_results(self.program, avals, wanted)
        self.compiled += [None] * (len(self.program.tasks) - len(self.compiled))
        for number, run in enumerate(self.program.instructions[end:], end):
            if isinstance(run, Run):
                specs = [self.result_specs[position] for position, rank in wanted if rank == run.rank]
                self.wanted[number] = {output: spec for output, spec in enumerate(specs) if spec is not None}
                self.run(number, run)

    def _is_partitioned(self, rank: int, held: _Held, spec: PartitionSpec | None) -> bool:
        if spec is None:
            return True
        mesh = self.mesh.unstack[rank]
        return NamedSharding(mesh, held.spec).is_equivalent_to(NamedSharding(mesh, spec), len(held.shape))

    def executables(self) -> Executables:
        """Collect the results; instructions with equal results share one object."""
        specs = {
            all_held: tuple(held.spec for held in all_held)
            for all_held in {*self.sent.values(), *self.received.values()}
        }
        avals = {all_held: tuple(held.aval for held in all_held) for all_held in set(self.sent.values())}
        sizes = {
            all_held: tuple(held.local_bytes(self.mesh) for held in all_held) for all_held in set(self.written.values())
        }
        results = zip(self.program.results, self.result_specs, strict=True)
        return Executables(
            program=self.program,
            tasks=tuple(compiled and compiled() for compiled in self.compiled),
            in_specs=tuple(self.argument_specs),
            out_specs=tuple(
                self.held[next(iter(result.values()))].spec if isinstance(result, dict) else spec
                for result, spec in results
            ),
            transfer_specs={number: specs[received] for number, received in self.received.items()},
            source_specs={number: specs[sent] for number, sent in self.sent.items()},
            transfer_avals={number: avals[sent] for number, sent in self.sent.items()},
            written_bytes={number: sizes[written] for number, written in self.written.items()},
            variants={number: compiled() for number, compiled in self.variants.items()},
        )


def _held_after(task: ProgramTask, found: Sequence[PartitionSpec | Callable[[], PartitionSpec]]) -> _AllHeld:
    """Return the contents of a task's outputs."""
    return tuple(_Held(spec, atom.aval, task.rank) for spec, atom in zip(found, task.graph.outputs, strict=True))


def _spec_of_other(shared: SharedSpecs, program: Program, task: int, output: int) -> PartitionSpec:
    return shared.of(program, task)[output]


def _spec_in_type(aval: Any) -> PartitionSpec:
    """Return the spec in a type on an Explicit mesh; on an Auto mesh, the spec of a whole array."""
    typed = struct_of(aval).sharding
    return PartitionSpec() if typed is None else canonical(typed.spec)


def _output_specs(compiled: Any, task: ProgramTask, mesh: RankMeshes) -> list[PartitionSpec | None]:
    submesh = mesh.unstack[task.rank]
    shapes = [tuple(atom.aval.shape) for atom in task.graph.outputs]
    return [spec_on(submesh, s, shape) for s, shape in zip(compiled.output_shardings, shapes, strict=True)]
