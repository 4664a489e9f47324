"""The program of a compiled step: a flat list of instructions over numbered slots.

Each slot belongs to one rank and holds one array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.tracing.ir import Graph, VerificationError
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["HOST_MEMORY", "Free", "Instruction", "Program", "ProgramTask", "Run", "Transfer", "Wait"]

HOST_MEMORY = "pinned_host"
"""The kind of memory to which residuals are offloaded."""


@dataclass(frozen=True, eq=False)
class ProgramTask:
    """A computation that one rank runs: once (outside loops; `stage` and `kind` are None), or for every microbatch.

    `donate` holds the positions of inputs that no later instruction reads. `pins` pairs an output with the input
    whose sharding it must keep (accumulators and carries, which go round the loop). If a task makes accumulators,
    `batch_dims` holds for each output its dimension over the shards of the batch and the mesh axes of that dimension,
    or None; `like` holds the position of the step's argument whose sharding the accumulator takes, or None. `out_specs`
    holds the specs of the outputs, if the task's author gives them; otherwise XLA chooses.
    """

    name: str
    rank: int
    graph: Graph
    stage: int | None = None
    kind: TaskKind | None = None
    fused: bool = False
    donate: frozenset[int] = frozenset()
    pins: tuple[tuple[int, int], ...] = ()
    batch_dims: tuple[Any, ...] = ()
    like: tuple[int | None, ...] = ()
    out_specs: tuple[PartitionSpec, ...] = ()

    def scheduled(self, microbatch: int) -> Task | FusedTask | None:
        """Return the task of the schedule that this one runs for a microbatch; None outside loops."""
        if self.stage is None or self.kind is None:
            return None
        if self.fused:
            backward = Task(TaskKind.BACKWARD, self.stage, microbatch)
            return FusedTask(Task(TaskKind.FORWARD, self.stage, microbatch), backward)
        return Task(self.kind, self.stage, microbatch)


@dataclass(frozen=True, slots=True)
class Run:
    """Run a task; `microbatch` is -1 outside loops."""

    task: int
    microbatch: int
    rank: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def reads(self) -> tuple[int, ...]:
        """Slots read."""
        return self.inputs

    def writes(self) -> tuple[int, ...]:
        """Slots written."""
        return self.outputs


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy slots of `source` into slots of `target`, as one batch.

    `memory` is None, or the kind of memory into which a rank copies its own slots: to the host (an offload), or back to
    the devices (a fetch).
    """

    source: int
    target: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    memory: str | None = None

    @property
    def verb(self) -> str:
        """`transfer`, `offload` or `fetch`."""
        return "transfer" if self.memory is None else "offload" if self.memory == HOST_MEMORY else "fetch"

    def reads(self) -> tuple[int, ...]:
        """Slots read."""
        return self.sent

    def writes(self) -> tuple[int, ...]:
        """Slots written."""
        return self.received


@dataclass(frozen=True, slots=True)
class Free:
    """Forget slots; `delete` holds the slots of donated arguments, whose buffers the caller has given away."""

    rank: int
    slots: tuple[int, ...]
    delete: tuple[int, ...] = ()

    def reads(self) -> tuple[int, ...]:
        """Return the slots that must be defined."""
        return self.slots

    def writes(self) -> tuple[int, ...]:
        """Return nothing: a free writes no slot."""
        return ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until an offload has ended: `copies` are its host slots, and `sent` the device slots, which end here."""

    rank: int
    sent: tuple[int, ...]
    copies: tuple[int, ...]

    def reads(self) -> tuple[int, ...]:
        """Return the slots that must be defined."""
        return (*self.sent, *self.copies)

    def writes(self) -> tuple[int, ...]:
        """Return nothing: a wait writes no slot."""
        return ()


Instruction = Run | Transfer | Free | Wait


@dataclass(frozen=True)
class Program:
    """Instructions in one global order that agrees with the order of every rank.

    `arguments[i]` and `results[i]` map ranks to slots, and the step's captured arrays are its first arguments;
    `indices` maps (rank, microbatch) to the slot of that index.
    """

    instructions: tuple[Instruction, ...]
    tasks: tuple[ProgramTask, ...]
    arguments: tuple[dict[int, int], ...]
    results: tuple[dict[int, int] | Any, ...]
    indices: dict[tuple[int, int], int]
    num_slots: int
    num_ranks: int

    def preset(self) -> dict[int, int]:
        """Return the slots that are filled before the first instruction, with their ranks."""
        slots = {slot: rank for ranks in self.arguments for rank, slot in ranks.items()}
        slots.update({slot: rank for (rank, _), slot in self.indices.items()})
        return slots

    def verify(self) -> None:
        """Check all tasks, and that slots are defined on their rank before use, and not read once freed or donated.

        Raises:
          VerificationError: naming the instruction and the slot.
        """
        for task in self.tasks:
            task.graph.verify()
        defined = self.preset()
        on_host: set[int] = set()  # what was offloaded
        for number, instruction in enumerate(self.instructions):
            where = f"instruction {number} ({self._describe(instruction)})"
            rank = instruction.source if isinstance(instruction, Transfer) else instruction.rank
            for slot in instruction.reads():
                if defined.get(slot) != rank:
                    raise VerificationError(f"{where} reads slot {slot}, which rank {rank} does not hold")
            _verify_memory(instruction, on_host, where)
            if isinstance(instruction, Free):
                for slot in instruction.slots:
                    del defined[slot]
            if isinstance(instruction, Free | Wait):
                continue
            if isinstance(instruction, Run):
                task = self.tasks[instruction.task]
                if task.rank != rank:
                    raise VerificationError(f"{where} runs a task of rank {task.rank} on rank {rank}")
                for position in task.donate:
                    del defined[instruction.inputs[position]]
            else:
                rank = instruction.target
            for slot in instruction.writes():
                if slot in defined:
                    raise VerificationError(f"{where} overwrites slot {slot}")
                defined[slot] = rank
        for position, result in enumerate(self.results):
            if isinstance(result, dict):
                for rank, slot in result.items():
                    if defined.get(slot) != rank:
                        raise VerificationError(f"result {position} is missing on rank {rank}")

    def _describe(self, instruction: Instruction) -> str:
        if isinstance(instruction, Run):
            suffix = f"__{instruction.microbatch}" if instruction.microbatch >= 0 else ""
            return f"run {self.tasks[instruction.task].name}{suffix} on rank {instruction.rank}"
        if isinstance(instruction, Transfer) and instruction.memory is not None:
            return f"{instruction.verb} on rank {instruction.target}"
        if isinstance(instruction, Transfer):
            return f"transfer rank {instruction.source} -> rank {instruction.target}"
        return f"{'wait' if isinstance(instruction, Wait) else 'free'} on rank {instruction.rank}"

    def as_text(self) -> str:
        """Return one line of text for each instruction."""
        lines: list[str] = []

        def names(slots: Iterable[int]) -> str:
            return ", ".join(f"s{slot}" for slot in slots)

        for instruction in self.instructions:
            if isinstance(instruction, Run):
                task = self.tasks[instruction.task]
                donated = [instruction.inputs[p] for p in sorted(task.donate)]
                note = f" donating {names(donated)}" if donated else ""
                lines.append(
                    f"rank {instruction.rank}: {names(instruction.outputs)} = "
                    f"{self._describe(instruction).split()[1]}({names(instruction.inputs)}){note}"
                )
            elif isinstance(instruction, Transfer) and instruction.memory is not None:
                lines.append(
                    f"rank {instruction.target}: {instruction.verb} {names(instruction.sent)} "
                    f"to {instruction.memory} as {names(instruction.received)}"
                )
            elif isinstance(instruction, Transfer):
                lines.append(
                    f"rank {instruction.source} -> rank {instruction.target}: "
                    f"send {names(instruction.sent)} receive {names(instruction.received)}"
                )
            elif isinstance(instruction, Wait):
                lines.append(f"rank {instruction.rank}: wait for {names(instruction.copies)}")
            else:
                lines.append(f"rank {instruction.rank}: free {names(instruction.slots)}")
        return "\n".join(lines)


def _verify_memory(instruction: Instruction, on_host: set[int], where: str) -> None:
    """Check that offloaded slots are fetched before anything else reads them; keep the set of these slots."""
    memory = instruction.memory if isinstance(instruction, Transfer) else None
    if isinstance(instruction, Transfer) and memory is not None and instruction.source != instruction.target:
        raise VerificationError(f"{where} moves slots of rank {instruction.source}: a rank offloads its own")
    if isinstance(instruction, Free):
        on_host.difference_update(instruction.slots)
        return
    if isinstance(instruction, Wait):
        for slot in instruction.copies:
            if slot not in on_host:
                raise VerificationError(f"{where} waits for slot {slot}, which was not offloaded")
        return
    for slot in instruction.reads():
        if (slot in on_host) != (memory is not None and memory != HOST_MEMORY):
            state = "is in host memory" if slot in on_host else "was not offloaded"
            raise VerificationError(f"{where} reads slot {slot}, which {state}")
    on_host.difference_update(instruction.writes())
    if memory == HOST_MEMORY:
        on_host.update(instruction.writes())
