"""A compiled step in the form of a jaxpr whose equations are tasks, transfers and deletions, as JaxPP prints it.

The listing has the same content as `Program.as_text`. Tasks have JaxPP's names: those of the loop's tasks are the
engine's (`fwd_0`), the others are called `before_loop_…`, `after_loop_…` and `fused_…`. Each value has a name of its
own, although the program reuses slots.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.api.tasks import OWN_KIND, TaskType
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.program.program import Program, ProgramTask, Run, Transfer, Wait
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["ProgramListing"]

_WIDTH = 83  # JAX's printer breaks operands there


@dataclass(frozen=True, eq=False, repr=False)
class ProgramListing:
    """The program of a compiled step; `str(listing)` prints it.

    `transfer_specs` holds, by the number of a transfer's instruction, the sharding of each value that it carries; it
    is empty before the step is compiled.
    """

    program: Program
    transfer_specs: Mapping[int, Sequence[PartitionSpec]]
    mesh: MpmdMesh

    def __repr__(self) -> str:
        return "\n".join(_Printer(self).lines())


class _Printer:
    def __init__(self, listing: ProgramListing) -> None:
        self.program, self.specs, self.mesh = listing.program, listing.transfer_specs, listing.mesh
        self.current: dict[int, str] = {}
        self.types: dict[int, Any] = {}
        self.count = 0
        self.names = _task_names(self.program)
        self.jaxprs = _jaxpr_names(self.program)

    def _define(self, slot: int, aval: Any) -> str:
        self.current[slot] = _letters(self.count)
        self.types[slot] = aval
        self.count += 1
        return f"{self.current[slot]}:{self._type(slot)}"

    def _read(self, slots: Iterable[int]) -> str:
        return " ".join(self.current[slot] for slot in slots)

    def lines(self) -> Iterable[str]:
        avals = self._argument_types()
        inputs = " ".join(self._define(slot, avals.get(slot)) for slot in sorted(self.program.preset()))
        yield "{ lambda ; " + inputs + ". let"
        for number, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, Run):
                yield from self._task(instruction)
            elif isinstance(instruction, Transfer):
                yield from self._transfer(number, instruction)
            elif isinstance(instruction, Wait):
                yield f"     = wait[mpmd_idx={instruction.rank}] {self._read(instruction.copies)}"
            else:
                dropped = " ".join(f"_:{self._type(slot)}" for slot in instruction.slots)
                yield f"    {dropped} = delete[mpmd_idx={instruction.rank}] {self._read(instruction.slots)}"
        results = (
            self._read(result[rank] for rank in sorted(result))
            if isinstance(result, dict)
            else f"{np.asarray(result.value)}:{result.aval.str_short(short_dtypes=True)}"
            for result in self.program.results
        )
        yield "  in (" + ", ".join(results) + ") }"

    def _type(self, slot: int) -> str:
        aval = self.types[slot]
        return "?" if aval is None else aval.str_short(short_dtypes=True)

    def _task(self, run: Run) -> Iterable[str]:
        task = self.program.tasks[run.task]
        operands = self._read(run.inputs)
        results = " ".join(
            self._define(slot, atom.aval) for slot, atom in zip(run.outputs, task.graph.outputs, strict=True)
        )
        yield f"    {results} = task[" if results else "    task["
        kinds = _kinds(task)
        yield f"      task_info={f'({task.stage}, {kinds[0]!r})' if len(kinds) == 1 else None}"
        yield f"      call_jaxpr={self.jaxprs[run.task]}"
        yield f"      mpmd_idx={run.rank}"
        yield f"      latency={sum(kind.default_latency for kind in kinds) or 1}"
        yield f"      call_counter={run.microbatch if run.microbatch >= 0 else None}"
        yield f"      donate_invars={_tuple(position in task.donate for position in range(len(run.inputs)))}"
        yield f"      task_name={self.names[run.task]}"
        yield _wrapped(operands)

    def _transfer(self, number: int, transfer: Transfer) -> Iterable[str]:
        operands = self._read(transfer.sent)
        types = [self.types[slot] for slot in transfer.sent]
        results = " ".join(self._define(slot, aval) for slot, aval in zip(transfer.received, types, strict=True))
        source = self.mesh.unstack[transfer.source]
        yield f"    {results} = {transfer.verb}["
        yield f"      src_mpmd_idx={transfer.source}"
        yield f"      src_shardings={[NamedSharding(source, spec) for spec in self.specs.get(number, ())]}"
        yield f"      tgt_mpmd_idx={transfer.target}"
        yield _wrapped(operands)

    def _argument_types(self) -> dict[int, Any]:
        """Return the types of the preset slots, from the first task that reads each of them."""
        preset = set(self.program.preset())
        types: dict[int, Any] = {}
        for instruction in self.program.instructions:
            if isinstance(instruction, Run):
                graph = self.program.tasks[instruction.task].graph
                for slot, value in zip(instruction.inputs, graph.inputs, strict=True):
                    if slot in preset:
                        types.setdefault(slot, value.aval)
            preset -= set(instruction.writes())
        return types


def _letters(number: int) -> str:
    """Return the name that JAX gives to a jaxpr's variable of this number: a to z, ba, bb."""
    number, last = divmod(number, 26)
    return (_letters(number) if number else "") + chr(ord("a") + last)


def _tuple(flags: Iterable[bool]) -> str:
    return str(tuple(flags))


def _wrapped(operands: str) -> str:
    return textwrap.fill(f"    ] {operands}".rstrip(), _WIDTH, subsequent_indent=" " * 6, break_long_words=False)


def _kinds(task: ProgramTask) -> list[TaskType]:
    """Return the kinds of a task of the loop; none for another task."""
    if task.kind is None:
        return []
    found = [next(theirs for theirs, ours in OWN_KIND.items() if ours is task.kind)]
    return [*found, TaskType.BWD] if task.fused and task.kind is TaskKind.FORWARD else found


def _task_names(program: Program) -> dict[int, str]:
    """Return JaxPP's name of each task, in the order of their first runs."""
    names: dict[int, str] = {}
    earlier: Counter[tuple[str, int]] = Counter()
    where = "before_loop"
    for run in program.instructions:
        if not isinstance(run, Run) or run.task in names:
            continue
        task = program.tasks[run.task]
        if task.kind is not None:
            where = "after_loop"
            parts = [f"{'fwd' if kind is TaskType.FWD else 'bwd'}_{task.stage}" for kind in _kinds(task)]
            names[run.task] = task.name if len(parts) == 1 else f"fused_{'_'.join(parts)}"
            continue
        number = earlier[where, task.rank]
        earlier[where, task.rank] += 1
        first, second = (number, task.rank) if where == "before_loop" else (task.rank, number)
        names[run.task] = f"{where}_{first}_{second}"
    return names


def _jaxpr_names(program: Program) -> dict[int, str]:
    """Return a name for each task's jaxpr: as in JAX, the first ones go to those that are used again."""
    runs = Counter(run.task for run in program.instructions if isinstance(run, Run))
    order = sorted(runs, key=lambda task: runs[task] == 1)
    return {task: f"jaxpr{number or ''}" for number, task in enumerate(order)}
