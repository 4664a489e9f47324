"""Executables for a program's tasks: one lowering for each distinct task, one executable for each device set.

A task is traced and lowered under the submesh's abstract mesh, so that identical stages on different ranks share the
lowering; XLA then compiles it for each rank's devices. Shardings inside a submesh are found task by task: a task is
compiled with the shardings of its inputs, XLA chooses its outputs', and those are the next task's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.fingerprint import Fingerprinter
from jaxpp_flax.engine.ir import Graph, struct_of
from jaxpp_flax.engine.mesh import RankMeshes, canonical, carried_over, spec_on
from jaxpp_flax.engine.program import Free, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.shared_specs import SharedSpecs

__all__ = ["Executables", "TaskCompiler", "compile_program"]

# Told after each compilation: (tasks compiled, tasks in all, name).
Progress = Callable[[int, int, str], None]

MeshT = TypeVar("MeshT", bound=RankMeshes)


@dataclass
class TaskCompiler(Generic[MeshT]):
    """Lowers and compiles tasks, each distinct one once.

    `options` are XLA's, as `jax.jit` takes them in `compiler_options`. `lowerings` and `compilations` count what was
    done; they grow with the number of distinct tasks, never with the number of microbatches.
    """

    mesh: MeshT
    options: Mapping[str, Any] | None = None
    lowerings: int = 0
    compilations: int = 0
    _lowered: dict[Hashable, Any] = field(default_factory=dict)
    _compiled: dict[Hashable, Any] = field(default_factory=dict)
    _fingerprints: Fingerprinter = field(default_factory=Fingerprinter)

    def compile(
        self, task: ProgramTask, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None]
    ) -> Any:
        """The executable of a task on its rank's devices; `None` in `out_specs` leaves the choice to XLA."""
        abstract = self.mesh.unstack[task.rank].abstract_mesh  # equal for ranks of one shape, which share a lowering
        key = (abstract, self._fingerprints.graph(task.graph), tuple(in_specs), tuple(out_specs), task.donate)
        devices = self.mesh.rank_devices(task.rank)
        compiled = self._compiled.get((key, devices))
        if compiled is None:
            lowered = self._lowered.get(key)
            if lowered is None:
                lowered = self._lowered[key] = self._lower(task, in_specs, out_specs)
                self.lowerings += 1
            compiled = self._compiled[key, devices] = lowered.compile(
                compiler_options=self.options, device_assignment=devices
            )
            self.compilations += 1
        return compiled

    def _lower(
        self, task: ProgramTask, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None]
    ) -> Any:
        abstract = self.mesh.unstack[task.rank].abstract_mesh
        avals = [struct_of(v.aval) for v in task.graph.inputs]
        with jax.sharding.use_abstract_mesh(abstract):
            jitted = jax.jit(
                _named(task.graph, task.name),
                in_shardings=tuple(NamedSharding(abstract, spec) for spec in in_specs),
                out_shardings=tuple(None if spec is None else NamedSharding(abstract, spec) for spec in out_specs),
                donate_argnums=tuple(sorted(task.donate)),
                keep_unused=True,
            )
            traced = jitted.trace(*avals)
            platform = self.mesh.rank_devices(task.rank)[0].platform
            return traced.lower(lowering_platforms=(platform,))


def _named(graph: Graph, name: str) -> Callable[..., tuple[Any, ...]]:
    def run(*operands: Any) -> tuple[Any, ...]:
        return tuple(graph.run(*operands))

    run.__name__ = run.__qualname__ = name  # what a profiler shows
    return run


@dataclass(frozen=True)
class Executables:
    """What the runtime needs beside the program: an executable for each task, the sharding of each slot written.

    For each transfer, `transfer_specs` are those of what arrives, `source_specs` those of what is sent, and
    `transfer_avals` the types (None for an argument of the step). `variants` holds, by instruction, the executables of
    runs whose inputs are partitioned otherwise than in the task's first run.
    """

    tasks: tuple[Any, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    transfer_specs: dict[int, tuple[PartitionSpec, ...]]
    source_specs: dict[int, tuple[PartitionSpec, ...]]
    transfer_avals: dict[int, tuple[Any, ...]]
    written_bytes: dict[int, list[int]]
    variants: dict[int, Any] = field(default_factory=dict[int, Any])


def _local_bytes(aval: Any, sharding: NamedSharding) -> int:
    size = 1
    for dim in sharding.shard_shape(tuple(aval.shape)):
        size *= dim
    return size * int(getattr(aval.dtype, "itemsize", 0))


def compile_program(
    program: Program,
    compiler: TaskCompiler[Any],
    argument_specs: Sequence[PartitionSpec],
    result_specs: Sequence[PartitionSpec | None],
    ranks: Sequence[int],
    progress: Progress | None = None,
    argument_shapes: Sequence[tuple[int, ...]] = (),
    shared: SharedSpecs | None = None,
) -> Executables:
    """Compile the tasks of `ranks` in program order, finding shardings on the way.

    Args:
      program: with slots allocated.
      compiler: shared by all programs of one step function, so that identical tasks compile once.
      argument_specs: for each argument of the program.
      result_specs: for each result; `None` keeps what XLA chose.
      ranks: those of this process.
      progress: told after each task.
      argument_shapes: for each argument of the program; needed where ranks' meshes differ in shape.
      shared: where not all ranks are this process's: tells how the others' tasks partition their results.
    """
    mesh: RankMeshes = compiler.mesh
    spec = _SlotSpecs()
    types: dict[int, tuple[Any, int]] = {}  # of what tasks wrote: (aval, rank)
    for ranks_of, argument in zip(program.arguments, argument_specs, strict=True):
        spec.update(dict.fromkeys(ranks_of.values(), argument))
    spec.update(dict.fromkeys(program.indices.values(), PartitionSpec()))
    shape = {
        slot: known
        for ranks_of, known in zip(program.arguments, argument_shapes, strict=False)
        for slot in ranks_of.values()
    }
    wanted = _specs_wanted(program, result_specs, mesh)
    mine = set(ranks)
    count = sum(task.rank in mine for task in program.tasks)
    executables: list[Any] = [None] * len(program.tasks)
    outputs: dict[int, Sequence[_Spec]] = {}
    sources: dict[int, list[_Spec]] = {}
    transfers: dict[int, list[_Spec]] = {}
    written: dict[int, list[tuple[_Spec, tuple[Any, int] | None]]] = {}
    compiled_for: dict[tuple[int, tuple[PartitionSpec, ...]], tuple[Any, Sequence[_Spec]]] = {}
    seen: set[int] = set()
    variants: dict[int, Any] = {}

    def compile_run(number: int, run: Run) -> tuple[Any, tuple[PartitionSpec, ...]]:
        task = program.tasks[run.task]
        in_specs = [spec[s] for s in run.inputs]
        out_specs = [wanted.get((number, i)) for i in range(len(task.graph.outputs))]
        if task.leading:
            wishes = [None if a is None else argument_specs[a] for a in task.like]
            out_specs = [s or _initial_spec(program, number, i, spec, wishes[i]) for i, s in enumerate(out_specs)]
        for output, source in task.pins:
            out_specs[output] = in_specs[source]
        compiled = compiler.compile(task, in_specs, out_specs)
        specs = _output_specs(compiled, task, mesh)
        if None in specs:  # XLA chose what no PartitionSpec can say: then it is told to choose otherwise
            compiled = compiler.compile(task, in_specs, [s or PartitionSpec() for s in specs])
            specs = _output_specs(compiled, task, mesh)
        return compiled, tuple(s or PartitionSpec() for s in specs)

    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        if isinstance(instruction, Transfer):
            target = mesh.unstack[instruction.target]
            alike = _alike(mesh, instruction)
            sources[number] = [spec.unread(s) for s in instruction.sent]
            written[number] = [(spec.unread(s), types.get(s)) for s in instruction.sent]
            for position, (sent, received) in enumerate(zip(instruction.sent, instruction.received, strict=True)):
                wish = wanted.get((number, position))
                shape[received] = shape.get(sent, ())
                spec[received] = wish or (spec.unread(sent) if alike else carried_over(spec[sent], target, shape[sent]))
                types.pop(received, None)
                if sent in types:
                    types[received] = types[sent]
            transfers[number] = [spec.unread(s) for s in instruction.received]
            continue
        task = program.tasks[instruction.task]
        if instruction.task not in outputs and task.rank not in mine and shared is not None:
            outputs[instruction.task] = [
                partial(_spec_of_other, shared, program, instruction.task, i) for i in range(len(task.graph.outputs))
            ]
        elif instruction.task not in outputs:
            executables[instruction.task], found = compile_run(number, instruction)
            outputs[instruction.task] = found
            if shared is not None:
                shared.publish(program, instruction.task, found)
            if progress is not None:
                progress(len(executables) - executables.count(None), count, task.name)
        made: Sequence[_Spec] = outputs[instruction.task]
        if shared is None:  # within a loop all runs are alike; other programs may read what was made elsewhere
            key = instruction.task, tuple(canonical(spec[s]) for s in instruction.inputs)
            if key not in compiled_for:
                new = instruction.task not in seen
                compiled_for[key] = (executables[key[0]], made) if new else compile_run(number, instruction)
                seen.add(instruction.task)
            executable, made = compiled_for[key]
            if executable is not executables[instruction.task]:
                variants[number] = executable
        for slot, atom, found_spec in zip(instruction.outputs, task.graph.outputs, made, strict=True):
            spec[slot], types[slot] = found_spec, (atom.aval, task.rank)
            shape[slot] = tuple(atom.aval.shape)
        written[number] = [(spec.unread(s), types[s]) for s in instruction.outputs]
    final = tuple(spec[next(iter(result.values()))] if isinstance(result, dict) else None for result in program.results)
    return Executables(
        tuple(executables),
        tuple(argument_specs),
        final,
        {number: tuple(map(_read, specs)) for number, specs in transfers.items()},
        {number: tuple(map(_read, specs)) for number, specs in sources.items()},
        {n: tuple(of[0] if of else None for _, of in written[n]) for n in transfers},
        {n: [_written_bytes(mesh, _read(s), of) for s, of in writes] for n, writes in written.items()},
        variants,
    )


# The spec of a slot, or how to find it out: another process may still be compiling what writes it.
_Spec: TypeAlias = "PartitionSpec | Callable[[], PartitionSpec]"


class _SlotSpecs(dict[int, Any]):
    """The specs of slots, each found out when it is read."""

    def __getitem__(self, slot: int) -> PartitionSpec:
        return _read(super().__getitem__(slot))

    def unread(self, slot: int) -> _Spec:
        """The spec as it was put in."""
        return super().__getitem__(slot)


def _read(spec: _Spec) -> PartitionSpec:
    return spec if isinstance(spec, PartitionSpec) else spec()


def _spec_of_other(shared: SharedSpecs, program: Program, task: int, output: int) -> PartitionSpec:
    return shared.of(program, task)[output]


def _written_bytes(mesh: RankMeshes, spec: PartitionSpec, of: tuple[Any, int] | None) -> int:
    if of is None:  # an argument that is passed on
        return 0
    aval, rank = of
    return _local_bytes(aval, NamedSharding(mesh.unstack[rank], spec))


def _alike(mesh: RankMeshes, transfer: Transfer) -> bool:
    """Whether both ends of a transfer have meshes of one shape, on which one spec means the same."""
    return mesh.unstack[transfer.source].shape == mesh.unstack[transfer.target].shape


def _specs_wanted(
    program: Program, result_specs: Sequence[PartitionSpec | None], mesh: RankMeshes
) -> dict[tuple[int, int], PartitionSpec]:
    """The specs that results must have, for (instruction, output) of their last writers."""
    wanted = {
        slot: spec
        for result, spec in zip(program.results, result_specs, strict=True)
        if isinstance(result, dict) and spec is not None
        for slot in result.values()
    }
    found: dict[tuple[int, int], PartitionSpec] = {}
    for number in range(len(program.instructions) - 1, -1, -1):
        instruction = program.instructions[number]
        if isinstance(instruction, Run):
            for position, slot in enumerate(instruction.outputs):
                if slot in wanted:
                    found[number, position] = wanted.pop(slot)
        elif isinstance(instruction, Transfer):
            for position, (sent, received) in enumerate(zip(instruction.sent, instruction.received, strict=True)):
                if received in wanted:
                    found[number, position] = wanted.pop(received)
                    if _alike(mesh, instruction):
                        wanted[sent] = found[number, position]
    return found


def _output_specs(compiled: Any, task: ProgramTask, mesh: RankMeshes) -> list[PartitionSpec | None]:
    submesh = mesh.unstack[task.rank]
    shapes = [tuple(atom.aval.shape) for atom in task.graph.outputs]
    return [spec_on(submesh, s, shape) for s, shape in zip(compiled.output_shardings, shapes, strict=True)]


def _initial_spec(
    program: Program, number: int, position: int, spec: _SlotSpecs, wish: PartitionSpec | None
) -> PartitionSpec:
    """The sharding of an accumulator: that of its parameter, or else of an array of its type in the same stage."""
    initial = program.instructions[number]
    if not isinstance(initial, Run):
        return PartitionSpec()
    first = program.tasks[initial.task]
    slot, aval, leading = initial.outputs[position], first.graph.outputs[position].aval, first.leading[position]
    shape = aval.shape if leading is None else aval.shape[1:]
    prefix = () if leading is None else (leading,)
    if wish is not None:
        return PartitionSpec(*prefix, *wish)
    for instruction in program.instructions[number + 1 :]:
        if isinstance(instruction, Run) and slot in instruction.inputs:
            task = program.tasks[instruction.task]
            for value, read in zip(task.graph.inputs, instruction.inputs, strict=True):
                same = value.aval.shape == shape and value.aval.dtype == aval.dtype
                if same and read != slot and read in spec and spec[read] != PartitionSpec():
                    return PartitionSpec(*prefix, *spec[read])
            break
    return PartitionSpec(*prefix)
