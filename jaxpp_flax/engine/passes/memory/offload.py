"""Move the values that a stage keeps for its backward to host memory after the forward, and back before the backward.

Both copies are instructions with a place in the order of their rank; `schedules.residuals.host_copies` chooses the
place for the program as for the simulator. A value moves if the stage's own backward of the same microbatch is its only
later reader. So parameters, the batch, accumulators, carries and results stay on the devices, and so does a value that
another stage of the rank still reads. Where the plan bounds the offloads, the rank waits for the end of a copy, and
holds the device's values until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxpp_flax.engine.program.program import HOST_MEMORY, Instruction, Program, Run, Transfer, Wait
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.schedules.residuals import HostCopy, ResidualPlan, host_copies, largest_share
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["offload"]


def offload(program: Program, plan: ResidualPlan | None) -> Program:
    """Add the offloads and the fetches of a plan to a program in which each slot is written once.

    Raises:
      TypeError: if a value to be moved is not an array.
    """
    if plan is None or not any(stage.offload for stage in plan.stages):
        return program
    found = _Values.of(program)
    moves: list[_Move] = []
    count = program.num_slots
    for rank in range(program.num_ranks):
        runs = found.runs[rank]
        scheduled = [_scheduled(program, number) for number in runs]
        for copy in host_copies(scheduled, plan):
            forward, fetch = runs[copy.offload_after], runs[copy.fetch_before]
            readers = found.backwards[copy.stage, copy.microbatch]
            slots = found.kept_only_for(readers, forward, copy)
            slots = found.largest(slots, plan.of(copy.stage).offload_values)
            if slots:
                host = tuple(range(count, count + len(slots)))
                back = tuple(range(host[-1] + 1, host[-1] + 1 + len(slots)))
                count += 2 * len(slots)
                gone = None if copy.gone_before is None else runs[copy.gone_before]
                moves.append(_Move(rank, found.sends_end[forward], gone, fetch, frozenset(readers), slots, host, back))
    return replace(program, instructions=_with_moves(program.instructions, moves), num_slots=count)


@dataclass(frozen=True)
class _Move:
    """An offload after one instruction, its end and a fetch before others, and the runs that read the fetched slots."""

    rank: int
    after: int
    gone: int | None
    before: int
    readers: frozenset[int]
    slots: tuple[int, ...]
    host: tuple[int, ...]
    back: tuple[int, ...]


def _with_moves(instructions: Sequence[Instruction], moves: Sequence[_Move]) -> tuple[Instruction, ...]:
    before, after = defaultdict[int, list[_Move]](list), defaultdict[int, list[_Move]](list)
    gone = defaultdict[int | None, list[_Move]](list)
    renamed: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by the number of the run that reads
    for move in moves:
        before[move.before].append(move)
        after[move.after].append(move)
        gone[move.gone].append(move)
        for reader in move.readers:
            renamed[reader].update(zip(move.slots, move.back, strict=True))
    changed: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        changed += [Wait(m.rank, m.slots, m.host) for m in gone.get(number, ())]
        changed += [Transfer(m.rank, m.rank, m.host, m.back, "device") for m in before.get(number, ())]
        if isinstance(instruction, Run) and number in renamed:
            inputs = tuple(renamed[number].get(slot, slot) for slot in instruction.inputs)
            instruction = replace(instruction, inputs=inputs)
        changed.append(instruction)
        changed += [Transfer(m.rank, m.rank, m.slots, m.host, HOST_MEMORY) for m in after.get(number, ())]
    return tuple(changed)


def _scheduled(program: Program, number: int) -> Any:
    run = program.instructions[number]
    return program.tasks[run.task].scheduled(run.microbatch) if isinstance(run, Run) else None


@dataclass(frozen=True)
class _Values:
    """Facts about the slots of a program, and about its instructions by number.

    Attributes:
      program: the program.
      runs: the runs of loop tasks of each rank.
      backwards: the backward runs of each stage and microbatch.
      sends_end: for each run, the last of the transfers that send its results.
      written: the instruction that writes each slot of one microbatch, with the microbatch and the type.
      readers: the instructions that read each slot.
      results: the slots of the results.
    """

    program: Program
    runs: list[list[int]]
    backwards: dict[tuple[int, int], list[int]]
    sends_end: dict[int, int]
    written: dict[int, tuple[int, int, Any]]
    readers: dict[int, list[int]]
    results: frozenset[int]

    @classmethod
    def of(cls, program: Program) -> _Values:
        results = frozenset(s for r in program.results if isinstance(r, dict) for s in r.values())
        found = cls(program, [[] for _ in range(program.num_ranks)], {}, {}, {}, {}, results)
        latest = -1
        for number, instruction in enumerate(program.instructions):
            for slot in instruction.reads():
                found.readers.setdefault(slot, []).append(number)
            if isinstance(instruction, Run):
                latest = number
                found._note_run(number, instruction)
            elif isinstance(instruction, Transfer):
                found.sends_end[latest] = number
                for sent, received in zip(instruction.sent, instruction.received, strict=True):
                    if sent in found.written:
                        found.written[received] = (number, *found.written[sent][1:])
        return found

    def _note_run(self, number: int, run: Run) -> None:
        task = self.program.tasks[run.task]
        self.sends_end[number] = number
        if task.stage is None:
            return
        self.runs[run.rank].append(number)
        if task.kind is not TaskKind.FORWARD:
            self.backwards.setdefault((task.stage, run.microbatch), []).append(number)
        going_round = {output for output, _ in task.pins}
        for position, (slot, atom) in enumerate(zip(run.outputs, task.graph.outputs, strict=True)):
            if position not in going_round:
                self.written[slot] = number, run.microbatch, atom.aval

    def kept_only_for(self, backwards: Sequence[int], forward: int, copy: HostCopy) -> tuple[int, ...]:
        """Return the slots that are there after a forward, and that only these backward runs read later."""
        read = dict.fromkeys(
            slot for number in backwards if number > forward for slot in self.program.instructions[number].reads()
        )
        return tuple(slot for slot in read if self._moves(slot, backwards, forward, copy))

    def largest(self, slots: tuple[int, ...], share: float) -> tuple[int, ...]:
        """Return slots with this share of their bytes: the largest ones that fit into it, and one more to reach it."""
        return tuple(slots[i] for i in largest_share([self._nbytes(slot) for slot in slots], share))

    def _nbytes(self, slot: int) -> int:
        aval = self.written[slot][2]
        return int(aval.size) * int(aval.dtype.itemsize)

    def _moves(self, slot: int, backwards: Sequence[int], forward: int, copy: HostCopy) -> bool:
        number, microbatch, aval = self.written.get(slot, (0, -1, None))
        if microbatch != copy.microbatch or number > forward or slot in self.results:
            return False
        later = [reader for reader in self.readers[slot] if reader > self.sends_end[forward]]
        if not set(later) <= set(backwards):
            return False
        if not isinstance(aval, ShapedArray):
            raise TypeError(
                f"the ResidualPlan offloads stage {copy.stage}, whose backward reads {aval}: only arrays can be moved "
                "to host memory. Keep the residuals of this stage on the devices."
            )
        # Keys of random numbers are a few bytes, and what the user has put on the host is there.
        return memory_kind_of(aval) is None and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
