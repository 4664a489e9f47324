"""Choose donations and frees, and reuse slots.

A task's executable serves every microbatch, so an input is donated only if each run is the last use of its value. A
sent value is never donated: the copy may still be reading it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any

from jaxpp_flax.engine.analyses.donation_pairs import donation_pairs, order_of_outputs
from jaxpp_flax.engine.program.program import Free, Instruction, Program, ProgramTask, Run, Transfer, Wait
from jaxpp_flax.engine.tracing.ir import VerificationError

__all__ = ["allocate_slots"]


def allocate_slots(
    program: Program,
    donated_arguments: Sequence[bool],
    *,
    keep_received: bool = False,
    donatable: Sequence[frozenset[int]] | None = None,
) -> Program:
    """Add frees and donations to an unrolled program, and renumber its slots so that freed ones are reused.

    Args:
      program: the result of `unroll`: each slot is written once.
      donated_arguments: for each argument, whether the caller gives its buffers away.
      keep_received: never donate a received value: between processes, the runtime watches it to see its arrival.
      donatable: for each task, the positions of the only inputs that it may donate; by default all.

    Raises:
      VerificationError: if the program frees slots already.
    """
    kept = {slot for result in program.results if isinstance(result, dict) for slot in result.values()}
    kept.update(program.indices.values())
    given: set[int] = set()
    for ranks, donated in zip(program.arguments, donated_arguments, strict=True):
        (given if donated else kept).update(ranks.values())
    transfers = [i for i in program.instructions if isinstance(i, Transfer)]
    not_given = {slot for transfer in transfers for slot in transfer.sent}
    if keep_received:
        not_given.update(slot for transfer in transfers if transfer.memory is None for slot in transfer.received)
    ends, read = _last_uses(program.instructions, kept)
    pairs = _donations(program, ends, not_given, donatable)
    tasks, instructions = _in_order(program, pairs)
    slots = _Slots()
    arguments = tuple({rank: slots.define([slot], rank)[0] for rank, slot in r.items()} for r in program.arguments)
    indices = {(rank, m): slots.define([slot], rank)[0] for (rank, m), slot in program.indices.items()}
    # Slots are reused, so most transfers and frees equal earlier ones, and share one object.
    alike: dict[Instruction, Instruction] = {}
    found = tuple(
        i if isinstance(i, Run) else alike.setdefault(i, i)
        for i in _with_frees(instructions, slots, ends, read, pairs, given)
    )
    results = tuple(
        {rank: slots.renamed[slot] for rank, slot in r.items()} if isinstance(r, dict) else r for r in program.results
    )
    return replace(
        program,
        instructions=found,
        tasks=tasks,
        arguments=arguments,
        results=results,
        indices=indices,
        num_slots=slots.count,
    )


@dataclass
class _Slots:
    """The new slot of each slot; a freed one is used again on its rank.

    A slot stays with its rank, so that ranks may run apart: in threads of their own, or in other processes.
    """

    renamed: dict[int, int] = field(default_factory=dict)
    free: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    count: int = 0

    def define(self, slots: Sequence[int], rank: int) -> tuple[int, ...]:
        unused = self.free[rank]
        new = tuple([heapq.heappop(unused) if unused else self._fresh() for _ in slots])
        self.renamed.update(zip(slots, new, strict=True))
        return new

    def _fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def of(self, slots: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.renamed.__getitem__, slots))

    def release(self, slots: Iterable[int], rank: int) -> None:
        for slot in slots:
            heapq.heappush(self.free[rank], self.renamed[slot])


def _with_frees(
    instructions: Sequence[Instruction],
    slots: _Slots,
    ends: Sequence[Sequence[int]],
    read: set[int],
    donate: Mapping[int, Mapping[int, int]],
    given: set[int],
) -> Iterator[Instruction]:
    """Yield the instructions over new slots, and after each instruction the frees of the slots that end with it."""
    for instruction, dying in zip(instructions, ends, strict=True):
        reads, writes = slots.of(instruction.reads()), instruction.writes()
        gone: set[int] = set()
        # Outputs get fresh slots before the inputs' slots are released: a runtime may write while it still reads.
        if isinstance(instruction, Run):
            rank = target = instruction.rank
            yield Run(instruction.task, instruction.microbatch, rank, reads, slots.define(writes, rank))
            gone.update(instruction.inputs[position] for position in donate[instruction.task])
        elif isinstance(instruction, Transfer):
            rank, target = instruction.source, instruction.target
            yield Transfer(rank, target, reads, slots.define(writes, target), instruction.memory)
        elif isinstance(instruction, Wait):
            rank = target = instruction.rank
            yield Wait(rank, slots.of(instruction.sent), slots.of(instruction.copies))
        else:
            raise VerificationError("slots are allocated once: the program already frees some")
        if freed := [slot for slot in dying if slot not in gone]:
            yield Free(rank, slots.of(freed), slots.of(slot for slot in freed if slot in given))
        slots.release(dying, rank)
        if unused := [slot for slot in writes if slot not in read]:
            yield Free(target, slots.of(unused))
            slots.release(unused, target)


def _last_uses(instructions: Sequence[Instruction], kept: set[int]) -> tuple[list[tuple[int, ...]], set[int]]:
    """Return the slots whose last read is each instruction, except those `kept`; and all slots read or kept."""
    read = set(kept)
    ends: list[tuple[int, ...]] = []
    for instruction in reversed(instructions):
        ends.append(tuple([slot for slot in dict.fromkeys(instruction.reads()) if slot not in read]))
        read.update(ends[-1])
    return ends[::-1], read


def _donations(
    program: Program,
    ends: Sequence[Sequence[int]],
    never: set[int],
    donatable: Sequence[frozenset[int]] | None,
) -> dict[int, dict[int, int]]:
    """Return, for each task that runs, its donated inputs, each with the output that takes over its memory."""
    donate: dict[int, set[int]] = {}
    for instruction, dying in zip(program.instructions, ends, strict=True):
        if not isinstance(instruction, Run):
            continue
        inputs = instruction.inputs
        last = set(dying) - never
        # If an earlier run of the task could not donate an input, later runs need not check this input.
        first = range(len(inputs)) if donatable is None else donatable[instruction.task]
        known = donate.get(instruction.task, first)
        possible = {p for p in known if inputs[p] in last}
        if len(set(inputs)) < len(inputs):
            possible = {p for p in possible if inputs.count(inputs[p]) == 1}
        donate[instruction.task] = possible
    return {
        number: donation_pairs(task.graph, donate[number], task.pins)
        for number, task in enumerate(program.tasks)
        if number in donate
    }


def _in_order(
    program: Program, pairs: Mapping[int, Mapping[int, int]]
) -> tuple[tuple[ProgramTask, ...], list[Instruction]]:
    """Return the tasks and instructions with outputs in the order in which JAX makes the pairs of a donation."""
    orders = {i: order_of_outputs(program.tasks[i].graph, of) for i, of in pairs.items() if of}
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
            batch_dims=ordered(task.batch_dims),
            like=ordered(task.like),
            out_specs=ordered(task.out_specs),
        )

    def instruction_of(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Run) or instruction.task not in orders:
            return instruction
        return replace(instruction, outputs=tuple([instruction.outputs[output] for output in orders[instruction.task]]))

    return tuple(starmap(task_of, enumerate(program.tasks))), [*map(instruction_of, program.instructions)]
