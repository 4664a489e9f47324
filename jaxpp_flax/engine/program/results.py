"""The requested partition of a program's results, and extra tasks for results with another partition.

A task is compiled with the requested partition of its results. But no task computes an argument that is returned
unchanged, a value carried round a loop keeps its sharding there, and a value that is returned twice can have only one
partition. Each of these gets one more task, at the program's end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.program.program import Free, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Graph, Value

__all__ = ["specs_wanted", "with_own_results"]


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
    """Add to the program one more task for each rank that must return some of its results anew.

    Args:
      program: with slots allocated.
      avals: the types of the slots that hold the results in `wanted`.
      wanted: (position of the result, rank): each result gets a slot of its own. A rank's task returns its results in
        this order.
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
