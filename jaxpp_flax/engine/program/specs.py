"""The partitions of a program's values: of accumulators, of results as requested, and of donated inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in, canonical, keep_axes
from jaxpp_flax.engine.program.program import Free, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, memory_kind_of, values
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of

__all__ = [
    "accumulator_spec",
    "followed_spec",
    "shard_bytes",
    "specs_wanted",
    "usable_donations",
    "uses_host_memory",
    "with_own_results",
]

_LANES = 128


def shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    """Return the bytes of each device's part of an array; 0 for types without a size."""
    shape = sharding.shard_shape(tuple(aval.shape))
    nbytes = math.prod(shape) * int(getattr(aval.dtype, "itemsize", 0))
    is_tpu = isinstance(sharding.mesh, Mesh) and sharding.mesh.devices.flat[0].platform == "tpu"
    return _padded(nbytes, shape) if is_tpu else nbytes


def _padded(nbytes: int, shape: Sequence[int]) -> int:
    """Return the bytes of an array on a TPU, which fills up one of its dimensions to a multiple of 128.

    Example:
      >>> _padded(4 * 512 * 64, (512, 64)), _padded(4 * 32 * 32 * 8, (32, 32, 8))
      (131072, 131072)
    """
    return min((nbytes // size * (-(-size // _LANES) * _LANES) for size in shape if size), default=nbytes)


def accumulator_spec(
    aval: Any,
    batch_dim: tuple[int, Any] | None,
    wish: PartitionSpec | None,
    inputs: Iterable[tuple[Any, PartitionSpec]],
) -> PartitionSpec:
    """Return the spec of an accumulator: its parameter's, or else that of an argument of its type that its task reads.

    Args:
      aval: the accumulator's type.
      batch_dim: the dimension along which each shard of the batch has its part, and its mesh axes; or None. The other
        dimensions are the parameter's.
      wish: the parameter's spec, if the parameter is known.
      inputs: the types and specs of the arguments of the step that the task reads.
    """
    dim, axes = batch_dim or (aval.ndim, None)
    shape = (*aval.shape[:dim], *aval.shape[dim + 1 :])
    if wish is None:
        alike = (spec for other, spec in inputs if (other.shape, other.dtype) == (shape, aval.dtype))
        wish = next((spec for spec in alike if any(spec.partitions)), PartitionSpec())
    if axes is None:
        return wish
    # What a parameter partitions over the axes of the batch (FSDP) is whole here: the shards take these axes.
    wish = keep_axes(wish, lambda name: name not in axes_in((axes,)))
    entries = (*wish, *[None] * (dim - len(wish)))
    return canonical(PartitionSpec(*entries[:dim], axes, *entries[dim:]))


def followed_spec(equation: Equation, spec_of: Mapping[Any, PartitionSpec]) -> PartitionSpec | None:
    """Return the partition of a result whose operand is converted, scaled, transposed or fetched from the host.

    None for other equations, and for an operand that `spec_of` does not have.
    """
    arrays = [v for v in values(equation.inputs) if v.aval.shape]
    if len(arrays) != 1 or len(equation.outputs) != 1 or (spec := spec_of.get(arrays[0])) is None:
        return None
    batch = facts_of(equation.primitive).batch
    if batch is Batch.TRANSPOSE:
        entries = (*spec.partitions, *[None] * (arrays[0].aval.ndim - len(spec.partitions)))
        return PartitionSpec(*(entries[i] for i in equation.params["permutation"]))
    return spec if batch is Batch.ELEMENTWISE or equation.name == "device_put" else None


def specs_wanted(
    program: Program, result_specs: Sequence[PartitionSpec | None], alike: Callable[[Transfer], bool]
) -> dict[int, PartitionSpec]:
    """Return the specs that results must have: of each returned value, and of the values that it is a copy of."""
    specs: dict[int, PartitionSpec] = {}
    for result, spec in zip(program.results, result_specs, strict=True):
        if spec is None or not isinstance(result, dict):
            continue
        for value in result.values():
            specs[value] = spec
            maker, position = program.maker(value)
            while isinstance(maker, Transfer) and alike(maker):
                specs[maker.sent[position]] = spec
                maker, position = program.maker(maker.sent[position])
    return specs


def with_own_results(program: Program, avals: Mapping[int, Any], wanted: Sequence[tuple[int, int]]) -> Program:
    """Add one more task for each rank that must return some of its results anew.

    `wanted` holds (position of the result, rank); a rank's task returns its results in this order. No task computes an
    argument that is returned unchanged, a value carried round a loop keeps its sharding there, and a value that is
    returned twice can have only one partition. `avals` holds the types of these results.
    """
    tasks, instructions = list(program.tasks), list(program.instructions)
    results: list[Any] = [dict(result) if isinstance(result, dict) else result for result in program.results]
    count = program.num_values
    for rank in sorted({rank for _, rank in wanted}):
        positions = [position for position, at_rank in wanted if at_rank == rank]
        old = [results[position][rank] for position in positions]
        edges = {value: Value(avals[value]) for value in old}
        new = tuple(range(count, count + len(old)))
        count += len(old)
        instructions.append(Run(len(tasks), -1, rank, tuple(edges), new))
        tasks.append(
            ProgramTask(f"results_{rank}", rank, Graph(tuple(edges.values()), tuple(edges[v] for v in old), ()))
        )
        for position, value in zip(positions, new, strict=True):
            results[position][rank] = value
        still = {value for result in results if isinstance(result, dict) for value in result.values()}
        if done := tuple(value for value in edges if value not in still and value not in program.preset):
            instructions.append(Free(rank, done))
    return replace(
        program, tasks=tuple(tasks), instructions=tuple(instructions), results=tuple(results), num_values=count
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
