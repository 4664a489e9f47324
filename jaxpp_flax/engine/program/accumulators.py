"""The partition of a loop's accumulators; a task without inputs makes them before the first microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.program.program import Program, Run

__all__ = ["accumulator_spec", "initial_spec"]


def accumulator_spec(
    aval: Any, leading: Any, wish: PartitionSpec | None, inputs: Iterable[tuple[Any, PartitionSpec | None]]
) -> PartitionSpec:
    """Return the spec of an accumulator: its parameter's, or else the spec of an array of the same type in its task.

    Args:
      aval: the accumulator's type.
      leading: the mesh axes that shard its first dimension, along which each shard of the batch has its part; or None.
      wish: the parameter's spec, if the parameter is known.
      inputs: the types and specs of the inputs of the task that reads the accumulator.
    """
    shape = aval.shape if leading is None else aval.shape[1:]
    if wish is None:
        alike = (spec for other, spec in inputs if (other.shape, other.dtype) == (shape, aval.dtype))
        wish = next((spec for spec in alike if spec is not None and any(spec.partitions)), PartitionSpec())
    if leading is None:
        return wish
    # A parameter is not partitioned over the axes of the batch as well.
    apart = set(axes_in(wish)).isdisjoint(axes_in((leading,)))
    return PartitionSpec(leading, *wish) if apart else PartitionSpec(leading)


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
    return accumulator_spec(task.graph.outputs[position].aval, task.leading[position], wish, inputs)


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
