"""The partition of a loop's accumulators; a task without inputs makes them before the first microbatch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.program.program import Program, Run

__all__ = ["initial_spec"]


def initial_spec(
    program: Program,
    number: int,
    position: int,
    spec_of: Callable[[int], PartitionSpec | None],
    wish: PartitionSpec | None,
) -> PartitionSpec:
    """Return the spec of an accumulator: its parameter's, or else an array's of the same type in the same stage.

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
    slot, aval, leading = initial.outputs[position], task.graph.outputs[position].aval, task.leading[position]
    if wish is None:
        shape = aval.shape if leading is None else aval.shape[1:]
        wish = _spec_of_relative(program, number, slot, (shape, aval.dtype), spec_of)
    if leading is None:
        return wish
    # The first dimension is the shards of the batch: a parameter is not partitioned over the same axes.
    apart = set(axes_in(wish)).isdisjoint(axes_in((leading,)))
    return PartitionSpec(leading, *wish) if apart else PartitionSpec(leading)


def _spec_of_relative(
    program: Program, number: int, slot: int, wanted: tuple[Any, Any], spec_of: Callable[[int], PartitionSpec | None]
) -> PartitionSpec:
    """Return the spec of an input of the same shape and dtype, in the task that first reads the accumulator."""
    # Slots are reused: if a slot is written from here on, its present value is not the value that the task reads.
    written = set(program.instructions[number].writes())
    for instruction in islice(program.instructions, number + 1, None):
        if not (isinstance(instruction, Run) and slot in instruction.inputs):
            if slot in instruction.writes():
                break  # nothing reads the accumulator
            written.update(instruction.writes())
            continue
        for value, read in zip(program.tasks[instruction.task].graph.inputs, instruction.inputs, strict=True):
            if (value.aval.shape, value.aval.dtype) == wanted and read not in written:
                spec = spec_of(read)
                if spec:
                    return spec
        break
    return PartitionSpec()
