"""Decide what is donated, what is freed and when, and let slots be used again.

A task's executable serves every microbatch, so an input is donated only if it is the last use in all of its runs. A
value that was sent is never donated: the copy may still be reading it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from jaxpp_flax.engine.program import Free, Instruction, Program, Run, Transfer

__all__ = ["allocate"]


def allocate(program: Program, donated_arguments: Sequence[bool], *, keep_received: bool = False) -> Program:
    """Add frees and donations to an unrolled program, and number its slots anew so that freed ones are reused.

    Args:
      program: from `unroll`: each slot is written once.
      donated_arguments: for each argument, whether the caller gives its buffers away.
      keep_received: donate nothing that was received: between processes, that is how its arrival is seen.
    """
    kept = {slot for result in program.results if isinstance(result, dict) for slot in result.values()}
    kept.update(program.indices.values())
    given: set[int] = set()
    for ranks, donated in zip(program.arguments, donated_arguments, strict=True):
        (given if donated else kept).update(ranks.values())
    last = _last_uses(program.instructions)
    sent = {slot for i in program.instructions if isinstance(i, Transfer) for slot in i.sent}
    never = kept | sent
    if keep_received:
        never.update(slot for i in program.instructions if isinstance(i, Transfer) for slot in i.received)
    donate = _donations(program, last, never)
    tasks = tuple(replace(t, donate=donate.get(i, frozenset())) for i, t in enumerate(program.tasks))

    renamed: dict[int, int] = {}
    # A slot stays with its rank, so that ranks may run apart: in threads of their own, or in other processes.
    free: dict[int, list[int]] = {}
    count = 0

    def define(slot: int, rank: int) -> int:
        nonlocal count
        if free.get(rank):
            renamed[slot] = heapq.heappop(free[rank])
        else:
            renamed[slot], count = count, count + 1
        return renamed[slot]

    arguments = tuple({rank: define(slot, rank) for rank, slot in ranks.items()} for ranks in program.arguments)
    indices = {key: define(slot, key[0]) for key, slot in program.indices.items()}
    instructions: list[Instruction] = []

    def release(slots: Sequence[int], rank: int) -> None:
        for slot in slots:
            heapq.heappush(free.setdefault(rank, []), renamed[slot])

    for number, instruction in enumerate(program.instructions):
        reads = tuple(renamed[s] for s in instruction.reads())
        if isinstance(instruction, Run):
            gone = {instruction.inputs[p] for p in donate.get(instruction.task, ())}
            rank = instruction.rank
        else:
            gone = set[int]()
            rank = instruction.source if isinstance(instruction, Transfer) else instruction.rank
        dying = [s for s in dict.fromkeys(instruction.reads()) if last[s] == number and s not in kept and s not in gone]
        # Outputs get fresh slots before the inputs' are released: a runtime may write while it still reads.
        target = instruction.target if isinstance(instruction, Transfer) else rank
        writes = tuple(define(s, target) for s in instruction.writes())
        if isinstance(instruction, Run):
            instructions.append(replace(instruction, inputs=reads, outputs=writes))
        elif isinstance(instruction, Transfer):
            instructions.append(replace(instruction, sent=reads, received=writes))
        unused = [s for s in instruction.writes() if s not in last and s not in kept]
        if dying:
            delete = tuple(renamed[s] for s in dying if s in given)
            instructions.append(Free(rank, tuple(renamed[s] for s in dying), delete))
        if unused:
            instructions.append(Free(target, tuple(renamed[s] for s in unused)))
        release([*dying, *sorted(gone)], rank)
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
        num_slots=count,
    )


def _last_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    last: dict[int, int] = {}
    for number, instruction in enumerate(instructions):
        for slot in instruction.reads():
            last[slot] = number
    return last


def _donations(program: Program, last: dict[int, int], never: set[int]) -> dict[int, frozenset[int]]:
    donate: dict[int, set[int]] = {}
    for number, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Run):
            continue
        inputs = instruction.inputs
        possible = {p for p, s in enumerate(inputs) if last[s] == number and s not in never and inputs.count(s) == 1}
        known = donate.setdefault(instruction.task, possible)
        known &= possible
    return {task: _aliasable(program, task, positions) for task, positions in donate.items()}


def _aliasable(program: Program, task: int, positions: set[int]) -> frozenset[int]:
    """Those that an output of the same type can reuse: XLA frees the others no earlier than we do."""
    graph = program.tasks[task].graph
    room: dict[tuple[tuple[int, ...], str], int] = {}
    for atom in graph.outputs:
        key = (tuple(atom.aval.shape), str(atom.aval.dtype))
        room[key] = room.get(key, 0) + 1
    pinned = [i for _, i in program.tasks[task].pins if i in positions]
    chosen: set[int] = set()
    for position in [*pinned, *sorted(positions - set(pinned))]:
        aval = graph.inputs[position].aval
        key = (tuple(aval.shape), str(aval.dtype))
        if room.get(key, 0) > 0:
            room[key] -= 1
            chosen.add(position)
    return frozenset(chosen)
