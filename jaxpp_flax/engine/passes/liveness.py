"""Choose donations and frees, and reuse slots.

A task's executable serves every microbatch, so an input is donated only if each run is the last use of its value. A
sent value is never donated: the copy may still be reading it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_flax.engine.program.program import Free, Instruction, Program, Run, Transfer, Wait
from jaxpp_flax.engine.tracing.ir import Atom, VerificationError, memory_kind_of

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
    donate = _donations(program, ends, not_given, donatable)
    slots = _Slots()
    arguments = tuple({rank: slots.define([slot], rank)[0] for rank, slot in r.items()} for r in program.arguments)
    indices = {(rank, m): slots.define([slot], rank)[0] for (rank, m), slot in program.indices.items()}
    # Slots are reused, so most transfers and frees equal earlier ones, and share one object.
    alike: dict[Instruction, Instruction] = {}
    instructions = tuple(
        i if isinstance(i, Run) else alike.setdefault(i, i)
        for i in _with_frees(program.instructions, slots, ends, read, donate, given)
    )
    results = tuple(
        {rank: slots.renamed[slot] for rank, slot in r.items()} if isinstance(r, dict) else r for r in program.results
    )
    return replace(
        program,
        instructions=instructions,
        tasks=tuple(replace(t, donate=donate.get(i, frozenset())) for i, t in enumerate(program.tasks)),
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
    donate: Mapping[int, frozenset[int]],
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
) -> dict[int, frozenset[int]]:
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
    return {task: _aliasable(program, task, positions) for task, positions in donate.items()}


def _aliasable(program: Program, task: int, positions: set[int]) -> frozenset[int]:
    """Choose the inputs whose memory an output of the same type can reuse; XLA frees the others no earlier than we."""
    graph = program.tasks[task].graph

    def kind(atom: Atom) -> Any:
        return tuple(atom.aval.shape), str(atom.aval.dtype), memory_kind_of(atom.aval)

    room = Counter(map(kind, graph.outputs))
    pinned = [i for _, i in program.tasks[task].pins if i in positions]
    chosen: set[int] = set()
    for position in [*pinned, *sorted(positions - set(pinned))]:
        if room[kind(graph.inputs[position])] > 0:
            room[kind(graph.inputs[position])] -= 1
            chosen.add(position)
    return frozenset(chosen)
