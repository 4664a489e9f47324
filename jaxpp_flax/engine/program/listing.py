"""A compiled step in the form of a jaxpr whose equations are tasks, transfers and deletions.

The listing has the same content as `Program.as_text`, in JaxPP's format: programs that search its lines for
`task_name=fwd_0` find it. Each value has a name of its own, although the program reuses slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.program.program import Program, Run, Transfer

__all__ = ["ProgramListing"]


@dataclass(frozen=True, eq=False, repr=False)
class ProgramListing:
    """The program of a compiled step; `str(listing)` prints it.

    `transfer_specs` holds, by the number of a transfer's instruction, the sharding of each value that it carries.
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

    def _define(self, slot: int, aval: Any) -> str:
        self.current[slot] = f"v{self.count}"
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
            else:
                dropped = " ".join(f"_:{self._type(slot)}" for slot in instruction.slots)
                yield f"    {dropped} = delete[mpmd_idx={instruction.rank}] {self._read(instruction.slots)}"
        results = (
            self._read(result[rank] for rank in sorted(result)) if isinstance(result, dict) else str(result.value)
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
        kinds = "None" if task.stage is None or task.kind is None else f"({task.stage}, {task.kind.name})"
        yield f"      task_info={kinds}"
        yield f"      mpmd_idx={run.rank}"
        yield f"      call_counter={run.microbatch if run.microbatch >= 0 else None}"
        yield f"      donate_invars={tuple(position in task.donate for position in range(len(run.inputs)))}"
        yield f"      task_name={task.name}"
        yield f"    ] {operands}".rstrip()

    def _transfer(self, number: int, transfer: Transfer) -> Iterable[str]:
        operands = self._read(transfer.sent)
        types = [self.types[slot] for slot in transfer.sent]
        results = " ".join(self._define(slot, aval) for slot, aval in zip(transfer.received, types, strict=True))
        source = self.mesh.unstack[transfer.source]
        yield f"    {results} = transfer["
        yield f"      src_mpmd_idx={transfer.source}"
        yield f"      src_shardings={[NamedSharding(source, spec) for spec in self.specs.get(number, ())]}"
        yield f"      tgt_mpmd_idx={transfer.target}"
        yield f"    ] {operands}"

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
