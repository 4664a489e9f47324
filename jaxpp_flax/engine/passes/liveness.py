"""Choose donations and frees.

A task's executable serves every microbatch, so an input is donated only if each run is the last use of its value. A
sent value is never donated: the copy may still be reading it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any, TypeAlias

from jaxpp_flax.engine.analyses.donation_pairs import donation_pairs, order_of_outputs
from jaxpp_flax.engine.program.program import Free, Instruction, LoopTask, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Graph, VerificationError

__all__ = ["Pairs", "check_ends", "donate_and_free"]

Pairs: TypeAlias = dict[tuple[Graph, frozenset[int], tuple[tuple[int, int], ...]], dict[int, int]]
"""The donation pairs of tasks: by their graph, the inputs that they may donate, and their pins."""


def donate_and_free(
    program: Program,
    donated_arguments: Sequence[bool],
    *,
    keep_received: bool,
    donatable: Sequence[frozenset[int]] | None = None,
    pairs: Pairs | None = None,
) -> Program:
    """Add the donations and the frees to a program that has none.

    Args:
      program: the result of `unroll`.
      donated_arguments: for each argument, whether the caller gives its buffers away.
      keep_received: never donate a received value: between processes, the runtime watches it to see its arrival.
      donatable: for each task, the positions of the only inputs that it may donate; by default all.
      pairs: of tasks that programs before this one had too; those of new tasks are added.
    """
    kept = {*program.returned, *program.indices.values()}
    given: set[int] = set()
    for ranks, donated in zip(program.arguments, donated_arguments, strict=True):
        (given if donated else kept).update(ranks.values())
    ends = {value: readers[-1] for value, readers in program.readers.items()}
    ends.update((value, number) for value, (number, _) in program.makers.items() if value not in ends)
    for value in kept:
        ends.pop(value, None)
    donated = _donations(program, ends, _never_donated(program, keep_received), donatable)
    pairs_of = _pairs_of(program.tasks, donated, {} if pairs is None else pairs)
    return _with_frees(_in_order(program, pairs_of), program.ranks, ends, given)


def check_ends(program: Program) -> None:
    """Check that every value ends that the program makes and does not return."""
    freed = {value for free in program.instructions if isinstance(free, Free) for value in free.values}
    for value, (number, _) in program.makers.items():
        if value not in freed and value not in program.donated and value not in program.returned:
            raise VerificationError(f"value {value}, which instruction {number} makes, never ends")


def _never_donated(program: Program, keep_received: bool) -> set[int]:
    moved: set[int] = set()
    for transfer in program.instructions:
        if isinstance(transfer, Transfer):
            moved.update(transfer.sent)
            if keep_received and transfer.memory is None:
                moved.update(transfer.received)
    return moved


def _donations(
    program: Program, ends: Mapping[int, int], never: set[int], donatable: Sequence[frozenset[int]] | None
) -> dict[int, set[int]]:
    """Return, for each task that runs, the inputs that it may donate."""
    donate: dict[int, set[int]] = {}
    for number, run in enumerate(program.instructions):
        if not isinstance(run, Run):
            continue
        inputs = run.inputs
        # If an earlier run of the task could not donate an input, later runs need not check this input.
        first = _donatable(program.tasks[run.task]) if donatable is None else donatable[run.task]
        inputs_before = donate.get(run.task, first)
        possible = {p for p in inputs_before if ends.get(inputs[p]) == number and inputs[p] not in never}
        if len(set(inputs)) < len(inputs):
            possible = {p for p in possible if inputs.count(inputs[p]) == 1}
        donate[run.task] = possible
    return donate


def _pairs_of(
    tasks: Sequence[ProgramTask], donate: Mapping[int, set[int]], remembered: Pairs
) -> dict[int, Mapping[int, int]]:
    """Return, for each task that donates, these inputs, each with the output that takes over its memory."""
    pairs: dict[int, Mapping[int, int]] = {}
    for number, positions in donate.items():
        task = tasks[number]
        key = task.graph, frozenset(positions), task.pins
        if positions and key not in remembered:
            remembered[key] = donation_pairs(*key)
        pairs[number] = remembered[key] if positions else {}
    return pairs


def _donatable(task: ProgramTask) -> Collection[int]:
    own = task.donatable if isinstance(task, LoopTask) else None
    return range(len(task.graph.inputs)) if own is None else own


def _in_order(program: Program, pairs: Mapping[int, Mapping[int, int]]) -> Program:
    """Donate, with the outputs of each task in the order in which JAX makes the pairs of a donation."""
    orders = {i: order_of_outputs(program.tasks[i].graph, of_task) for i, of_task in pairs.items() if of_task}
    orders = {i: order for i, order in orders.items() if order != sorted(order)}

    def task_of(number: int, task: ProgramTask) -> ProgramTask:
        task = replace(task, donate=frozenset(pairs.get(number, ())))
        if number not in orders:
            return task
        order = orders[number]

        def ordered(entries: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple([entries[output] for output in order]) if entries else ()

        place = {output: i for i, output in enumerate(order)}
        return replace(
            task,
            graph=replace(task.graph, outputs=ordered(task.graph.outputs)),
            pins=tuple((place[output], source) for output, source in task.pins),
            out_specs=ordered(task.out_specs),
        )

    def instruction_of(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Run) or instruction.task not in orders:
            return instruction
        return replace(instruction, outputs=tuple([instruction.outputs[output] for output in orders[instruction.task]]))

    tasks = tuple(starmap(task_of, enumerate(program.tasks)))
    return replace(program, tasks=tasks, instructions=tuple(map(instruction_of, program.instructions)))


def _with_frees(program: Program, ranks: Mapping[int, int], ends: Mapping[int, int], given: set[int]) -> Program:
    """Free each value behind the instruction with which it ends, unless this one takes over its memory.

    `ranks` are those of the values; `given` are the values of donated arguments.
    """
    ending: defaultdict[int, list[int]] = defaultdict(list)
    for value, number in ends.items():
        if value not in program.donated:
            ending[number].append(value)

    def instructions() -> Iterator[Instruction]:
        for number, instruction in enumerate(program.instructions):
            yield instruction
            dying = ending.get(number, ())
            for rank in dict.fromkeys([ranks[value] for value in dying]):  # of a transfer, both ends
                freed = tuple([value for value in dying if ranks[value] == rank])
                yield Free(rank, freed, tuple([value for value in freed if value in given]))

    return replace(program, instructions=tuple(instructions()))
