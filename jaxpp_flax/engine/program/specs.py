"""The partitions of a program's values: of accumulators, of results as requested, and of donated inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in, canonical, keep_axes
from jaxpp_flax.engine.program.program import Free, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value, memory_kind_of

__all__ = [
    "accumulator_spec",
    "initial_spec",
    "specs_wanted",
    "usable_donations",
    "uses_host_memory",
    "with_own_results",
]


def accumulator_spec(
    aval: Any,
    batch_dim: tuple[int, Any] | None,
    wish: PartitionSpec | None,
    inputs: Iterable[tuple[Any, PartitionSpec | None]],
) -> PartitionSpec:
    """Return the spec of an accumulator: its parameter's, or else the spec of an array of the same type in its task.

    Args:
      aval: the accumulator's type.
      batch_dim: the dimension along which each shard of the batch has its part, and its mesh axes; or None. The other
        dimensions are the parameter's.
      wish: the parameter's spec, if the parameter is known.
      inputs: the types and specs of the inputs of the task that reads the accumulator.
    """
    dim, axes = batch_dim or (aval.ndim, None)
    shape = (*aval.shape[:dim], *aval.shape[dim + 1 :])
    if wish is None:
        alike = (spec for other, spec in inputs if (other.shape, other.dtype) == (shape, aval.dtype))
        wish = next((spec for spec in alike if spec is not None and any(spec.partitions)), PartitionSpec())
    if axes is None:
        return wish
    # What a parameter partitions over the axes of the batch (FSDP) is whole here: the shards take these axes.
    wish = keep_axes(wish, lambda name: name not in axes_in((axes,)))
    entries = (*wish, *[None] * (dim - len(wish)))
    return canonical(PartitionSpec(*entries[:dim], axes, *entries[dim:]))


def initial_spec(
    program: Program,
    number: int,
    position: int,
    spec_of: Callable[[int], PartitionSpec | None],
    wish: PartitionSpec | None,
) -> PartitionSpec:
    """Return the spec with which an accumulator is made; see `accumulator_spec`.

    Args:
      program: with slots allocated.
      number: the number of the instruction that makes the accumulator.
      position: the position of the accumulator among the outputs of that instruction's task.
      spec_of: returns the spec of a slot's value when this instruction runs; None for an empty slot.
      wish: the parameter's spec, if the parameter is known.
    """
    initial = program.instructions[number]
    if not isinstance(initial, Run):
        return PartitionSpec()
    task = program.tasks[initial.task]
    inputs = _inputs_of_reader(program, number, initial.outputs[position], spec_of)
    return accumulator_spec(task.graph.outputs[position].aval, task.batch_dims[position], wish, inputs)


def _inputs_of_reader(
    program: Program, number: int, slot: int, spec_of: Callable[[int], PartitionSpec | None]
) -> Iterator[tuple[Any, PartitionSpec | None]]:
    """Yield the types and specs of the inputs of the task that first reads a slot after an instruction."""
    # Slots are reused: if a slot is written from here on, its present value is not the value that the task reads.
    written = set(program.instructions[number].writes())
    for instruction in islice(program.instructions, number + 1, None):
        if isinstance(instruction, Run) and slot in instruction.inputs:
            for value, read in zip(program.tasks[instruction.task].graph.inputs, instruction.inputs, strict=True):
                if read not in written:
                    yield value.aval, spec_of(read)
            return
        if slot in instruction.writes():
            return  # nothing reads the accumulator
        written.update(instruction.writes())


def specs_wanted(
    program: Program, result_specs: Sequence[PartitionSpec | None], alike: Callable[[Transfer], bool]
) -> dict[int, dict[int, PartitionSpec]]:
    """Return the specs that results must have, by instruction and output of their last writers."""
    wanted = {
        slot: spec
        for result, spec in zip(program.results, result_specs, strict=True)
        if isinstance(result, dict) and spec is not None
        for slot in result.values()
    }
    found: dict[int, dict[int, PartitionSpec]] = {}
    for number in range(len(program.instructions) - 1, -1, -1):
        if not wanted:
            break
        instruction = program.instructions[number]
        for position, slot in enumerate(instruction.writes()):
            if slot in wanted:
                spec = found.setdefault(number, {})[position] = wanted.pop(slot)
                if isinstance(instruction, Transfer) and alike(instruction):
                    wanted[instruction.sent[position]] = spec
    return found


def with_own_results(program: Program, avals: Mapping[int, Any], wanted: Sequence[tuple[int, int]]) -> Program:
    """Add one more task for each rank that must return some of its results anew, each in a slot of its own.

    `wanted` holds (position of the result, rank); a rank's task returns its results in this order. No task computes an
    argument that is returned unchanged, a value carried round a loop keeps its sharding there, and a value that is
    returned twice can have only one partition. `avals` holds the types of the slots of these results.
    """
    tasks, instructions = list(program.tasks), list(program.instructions)
    results: list[Any] = [dict(result) if isinstance(result, dict) else result for result in program.results]
    count = program.num_slots
    arguments = {slot for slots in program.arguments for slot in slots.values()}  # these belong to the caller
    for rank in sorted({rank for _, rank in wanted}):
        positions = [position for position, of in wanted if of == rank]
        slots = [results[position][rank] for position in positions]
        values = {slot: Value(avals[slot]) for slot in slots}
        outputs = tuple(range(count, count + len(slots)))
        count += len(slots)
        instructions.append(Run(len(tasks), -1, rank, tuple(values), outputs))
        tasks.append(
            ProgramTask(f"results_{rank}", rank, Graph(tuple(values.values()), tuple(values[s] for s in slots), ()))
        )
        for position, slot in zip(positions, outputs, strict=True):
            results[position][rank] = slot
        kept = arguments.union(result[rank] for result in results if isinstance(result, dict) and rank in result)
        if done := tuple(slot for slot in values if slot not in kept):
            instructions.append(Free(rank, done))
    return replace(
        program, tasks=tuple(tasks), instructions=tuple(instructions), results=tuple(results), num_slots=count
    )


def uses_host_memory(task: ProgramTask) -> bool:
    """Return whether a task reads or returns a value that is not in device memory."""
    return any(memory_kind_of(atom.aval) is not None for atom in (*task.graph.inputs, *task.graph.outputs))


def usable_donations(
    task: ProgramTask, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None]
) -> tuple[int, ...]:
    """Return the positions of a task's donated inputs whose memory an output can take over.

    `task.donate` compares whole arrays. If JAX knows all shardings, it compares shards, and warns of each donated shard
    that no output can reuse; otherwise XLA decides. With two kinds of memory and one unknown sharding, JAX pairs inputs
    with outputs of another memory, and the call fails: then nothing is donated.
    """
    if None in out_specs:
        return () if uses_host_memory(task) else tuple(sorted(task.donate))

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
