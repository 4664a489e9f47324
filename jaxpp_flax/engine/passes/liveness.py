"""Choose donations and frees, and reuse slots.

A task's executable serves every microbatch, so an input is donated only if each run is the last use of its value. A
sent value is never donated: the copy may still be reading it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxpp_flax.engine.program.program import Free, Instruction, Program, Run, Transfer
from jaxpp_flax.engine.tracing.ir import VerificationError, memory_kind_of

__all__ = ["allocate"]


def allocate(program: Program, donated_arguments: Sequence[bool], *, keep_received: bool = False) -> Program:
    """Add frees and donations to an unrolled program, and renumber its slots so that freed ones are reused.

    Args:
      program: the result of `unroll`: each slot is written once.
      donated_arguments: for each argument, whether the caller gives its buffers away.
      keep_received: never donate a received value: between processes, the runtime watches it to see its arrival.

    Raises:
      VerificationError: if the program frees slots already.
    """
    kept = {slot for result in program.results if isinstance(result, dict) for slot in result.values()}
    kept.update(program.indices.values())
    given: set[int] = set()
    for ranks, donated in zip(program.arguments, donated_arguments, strict=True):
        (given if donated else kept).update(ranks.values())
    ends, read = _last_uses(program.instructions, kept)
    not_given = {slot for i in program.instructions if isinstance(i, Transfer) for slot in i.sent}
    if keep_received:
        not_given.update(slot for i in program.instructions if isinstance(i, Transfer) for slot in i.received)
    donate = _donations(program, ends, not_given)
    tasks = tuple(replace(t, donate=donate.get(i, frozenset())) for i, t in enumerate(program.tasks))

    renamed: dict[int, int] = {}
    # A slot stays with its rank, so that ranks may run apart: in threads of their own, or in other processes.
    free: defaultdict[int, list[int]] = defaultdict(list)
    fresh = itertools.count()

    def define(slots: Sequence[int], rank: int) -> tuple[int, ...]:
        unused = free[rank]
        new = tuple([heapq.heappop(unused) if unused else next(fresh) for _ in slots])
        renamed.update(zip(slots, new, strict=True))
        return new

    def release(slots: Iterable[int], rank: int) -> None:
        for slot in slots:
            heapq.heappush(free[rank], renamed[slot])

    arguments = tuple({rank: define([slot], rank)[0] for rank, slot in ranks.items()} for ranks in program.arguments)
    indices = {(rank, m): define([slot], rank)[0] for (rank, m), slot in program.indices.items()}
    instructions: list[Instruction] = []
    # Slots are reused, so most transfers and frees equal earlier ones, and share one object.
    alike: dict[Instruction, Instruction] = {}

    def add(instruction: Transfer | Free) -> None:
        instructions.append(alike.setdefault(instruction, instruction))

    for instruction, dying in zip(program.instructions, ends, strict=True):
        old_reads, old_writes = instruction.reads(), instruction.writes()
        reads = tuple(map(renamed.__getitem__, old_reads))
        # Outputs get fresh slots before the inputs' slots are released: a runtime may write while it still reads.
        if isinstance(instruction, Run):
            rank = target = instruction.rank
            writes = define(old_writes, rank)
            instructions.append(Run(instruction.task, instruction.microbatch, rank, reads, writes))
            gone = {old_reads[position] for position in donate[instruction.task]}
        elif isinstance(instruction, Transfer):
            rank, target = instruction.source, instruction.target
            add(Transfer(rank, target, reads, define(old_writes, target)))
            gone = set[int]()
        else:
            raise VerificationError("slots are allocated once: the program already frees some")
        freed = [s for s in dying if s not in gone]
        if freed:
            delete = tuple(renamed[s] for s in freed if s in given)
            add(Free(rank, tuple(map(renamed.__getitem__, freed)), delete))
        release(dying, rank)
        if not read.issuperset(old_writes):
            unused = [s for s in old_writes if s not in read]
            add(Free(target, tuple(map(renamed.__getitem__, unused))))
            release(unused, target)
    results = tuple(
        {rank: renamed[slot] for rank, slot in r.items()} if isinstance(r, dict) else r for r in program.results
    )
    return replace(
        program,
        instructions=tuple(instructions),
        tasks=tasks,
        arguments=arguments,
        results=results,
        indices=indices,
        num_slots=next(fresh),
    )


def _last_uses(instructions: Sequence[Instruction], kept: set[int]) -> tuple[list[tuple[int, ...]], set[int]]:
    """Return the slots whose last read is each instruction, except those `kept`; and all slots read or kept."""
    read = set(kept)
    ends: list[tuple[int, ...]] = []
    for instruction in reversed(instructions):
        ends.append(tuple([slot for slot in dict.fromkeys(instruction.reads()) if slot not in read]))
        read.update(ends[-1])
    return ends[::-1], read


def _donations(program: Program, ends: Sequence[Sequence[int]], never: set[int]) -> dict[int, frozenset[int]]:
    donate: dict[int, set[int]] = {}
    for instruction, dying in zip(program.instructions, ends, strict=True):
        if not isinstance(instruction, Run):
            continue
        inputs = instruction.inputs
        last = set(dying) - never
        # If an earlier run of the task could not donate an input, later runs need not check this input.
        known = donate.get(instruction.task, range(len(inputs)))
        possible = {p for p in known if inputs[p] in last}
        if len(set(inputs)) < len(inputs):
            possible = {p for p in possible if inputs.count(inputs[p]) == 1}
        donate[instruction.task] = possible
    return {task: _aliasable(program, task, positions) for task, positions in donate.items()}


def _aliasable(program: Program, task: int, positions: set[int]) -> frozenset[int]:
    """Choose the inputs whose memory an output of the same type can reuse; XLA frees the others no earlier than we."""
    graph = program.tasks[task].graph
    room: dict[tuple[tuple[int, ...], str, str | None], int] = {}
    for atom in graph.outputs:
        key = (tuple(atom.aval.shape), str(atom.aval.dtype), memory_kind_of(atom.aval))
        room[key] = room.get(key, 0) + 1
    pinned = [i for _, i in program.tasks[task].pins if i in positions]
    chosen: set[int] = set()
    for position in [*pinned, *sorted(positions - set(pinned))]:
        aval = graph.inputs[position].aval
        key = (tuple(aval.shape), str(aval.dtype), memory_kind_of(aval))
        if room.get(key, 0) > 0:
            room[key] -= 1
            chosen.add(position)
    return frozenset(chosen)
