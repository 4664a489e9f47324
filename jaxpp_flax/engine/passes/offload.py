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
from jaxpp_flax.schedules.residuals import HostCopy, ResidualPlan, host_copies
from jaxpp_flax.schedules.task import RUN_FORWARD

__all__ = ["offload"]


def offload(program: Program, plan: ResidualPlan | None) -> Program:
    """Add the offloads and the fetches of a plan to a program without frees and donations.

    Raises:
      TypeError: if a value to be moved is not an array.
    """
    if plan is None or not any(stage.offload for stage in plan.stages):
        return program
    runs: list[list[int]] = [[] for _ in range(program.num_ranks)]  # of loop tasks
    backwards: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, run in enumerate(program.instructions):
        if not isinstance(run, Run) or (stage := program.tasks[run.task].stage) is None:
            continue
        runs[run.rank].append(number)
        if program.tasks[run.task].kind not in RUN_FORWARD:
            backwards[stage, run.microbatch].append(number)
    moves: list[_Move] = []
    count = program.num_values
    for rank, numbers in enumerate(runs):
        for copy in host_copies([_scheduled(program, number) for number in numbers], plan):
            forward, fetch = numbers[copy.offload_after], numbers[copy.fetch_before]
            gone = None if copy.gone_before is None else numbers[copy.gone_before]
            kept = _Kept(program, copy, forward, _last_send(program, forward), backwards[copy.stage, copy.microbatch])
            if values := kept.values():
                host, back = (tuple(range(n, n + len(values))) for n in (count, count + len(values)))
                count += 2 * len(values)
                moves.append(_Move(rank, kept.sent, gone, fetch, frozenset(kept.readers), values, host, back))
    return replace(program, instructions=_with_moves(program.instructions, moves), num_values=count)


@dataclass(frozen=True)
class _Move:
    """An offload after one instruction, its end and a fetch before others, and the runs that read what is fetched."""

    rank: int
    after: int
    gone: int | None
    before: int
    readers: frozenset[int]
    values: tuple[int, ...]
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
            renamed[reader].update(zip(move.values, move.back, strict=True))
    changed: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        changed += [Wait(m.rank, m.values, m.host) for m in gone.get(number, ())]
        changed += [Transfer(m.rank, m.rank, m.host, m.back, "device") for m in before.get(number, ())]
        if isinstance(instruction, Run) and number in renamed:
            inputs = tuple(renamed[number].get(value, value) for value in instruction.inputs)
            instruction = replace(instruction, inputs=inputs)
        changed.append(instruction)
        changed += [Transfer(m.rank, m.rank, m.values, m.host, HOST_MEMORY) for m in after.get(number, ())]
    return tuple(changed)


def _scheduled(program: Program, number: int) -> Any:
    run = program.instructions[number]
    return program.tasks[run.task].scheduled(run.microbatch) if isinstance(run, Run) else None


def _last_send(program: Program, run: int) -> int:
    """Return the number of the last of the transfers behind a run, which send its results."""
    while run + 1 < len(program.instructions) and isinstance(program.instructions[run + 1], Transfer):
        run += 1
    return run


@dataclass(frozen=True)
class _Kept:
    """What a stage keeps from a forward for its backward.

    `forward` is the number of the forward's run, `sent` of its last transfer, and `readers` of the backward's runs.
    """

    program: Program
    copy: HostCopy
    forward: int
    sent: int
    readers: Sequence[int]

    def values(self) -> tuple[int, ...]:
        """Return the values that move, in the order in which the backward reads them."""
        behind = (number for number in self.readers if number > self.forward)
        read = dict.fromkeys(value for number in behind for value in self.program.instructions[number].reads())
        return tuple(value for value in read if self._moves(value))

    def _moves(self, value: int) -> bool:
        """Return True for a value that is there after the forward, and that only the backward reads later.

        What goes on to the next microbatch stays.
        """
        program, (run, position) = self.program, self.program.origin(value)
        if run is None or program.makers[value][0] > self.forward or value in program.returned:
            return False
        task = program.tasks[run.task]
        if run.microbatch != self.copy.microbatch or position in {output for output, _ in task.pins}:
            return False
        if any(reader > self.sent and reader not in self.readers for reader in program.readers[value]):
            return False
        aval = task.graph.outputs[position].aval
        if not isinstance(aval, ShapedArray):
            raise TypeError(
                f"the ResidualPlan offloads stage {self.copy.stage}, whose backward reads {aval}: only arrays can be "
                "moved to host memory. Keep the residuals of this stage on the devices."
            )
        # Keys of random numbers are a few bytes, and what the user has put on the host is there.
        stays = memory_kind_of(aval) is not None or jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        return not stays
