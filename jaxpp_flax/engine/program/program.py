"""The program of a compiled step: tasks, and a flat list of instructions over values.

A value is a number that stands for one array on one rank. It is made once in a step: by an argument, by the index of a
microbatch, or by one instruction. (An `ir.Value` is an edge of a task's graph: each run of the task makes a value of
it, and each transfer another one.) So who makes a value and who reads it are facts, which a `Program` finds once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.program.waits import Action, circular_wait, walks_of, without_twins
from jaxpp_flax.engine.tracing.ir import Graph, VerificationError
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["HOST_MEMORY", "Free", "Instruction", "LoopTask", "Program", "ProgramTask", "Run", "Transfer", "Wait"]

HOST_MEMORY = "pinned_host"
"""The kind of memory to which residuals are offloaded."""


@dataclass(frozen=True, eq=False, repr=False)
class ProgramTask:
    """A computation that one rank runs: once (outside loops; `stage` and `kind` are None), or for every microbatch.

    `donate` holds the positions of inputs that no later instruction reads. `pins` pairs an output with the input
    whose sharding it must keep (accumulators and carries, which go round the loop). `out_specs` holds the specs of the
    outputs, where they are given: of accumulators, and by the author of a task. Otherwise XLA chooses.
    """

    name: str
    rank: int
    graph: Graph
    stage: int | None = None
    kind: TaskKind | None = None
    donate: frozenset[int] = frozenset()
    pins: tuple[tuple[int, int], ...] = ()
    out_specs: tuple[PartitionSpec, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name!r} on rank {self.rank}"

    def scheduled(self, microbatch: int) -> Task | None:
        """Return the task of the schedule that this one runs for a microbatch; None outside loops."""
        if self.stage is None or self.kind is None:
            return None
        return Task(self.kind, self.stage, microbatch)


@dataclass(frozen=True, eq=False, repr=False)
class LoopTask(ProgramTask):
    """The work of one stage and kind for one microbatch.

    `donatable` has the positions of the only inputs that it may donate; None: every one that it reads last.
    """

    stage: int = field()
    kind: TaskKind = field()
    donatable: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Run a task; `microbatch` is -1 outside loops."""

    task: int
    microbatch: int
    rank: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def reads(self) -> tuple[int, ...]:
        """Return the values that the task reads."""
        return self.inputs

    def writes(self) -> tuple[int, ...]:
        """Return the values that the task makes."""
        return self.outputs


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy values of `source` to `target`, as one batch.

    `memory` is None, or the kind of memory into which a rank copies its own values: to the host (an offload), or back
    to the devices (a fetch).
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
        """Return the values that are copied."""
        return self.sent

    def writes(self) -> tuple[int, ...]:
        """Return the copies."""
        return self.received


@dataclass(frozen=True, slots=True)
class Free:
    """Forget values; `delete` holds those of donated arguments, whose buffers the caller has given away."""

    rank: int
    values: tuple[int, ...]
    delete: tuple[int, ...] = ()

    def reads(self) -> tuple[int, ...]:
        """Return nothing: a free does not look at its `values`."""
        return ()

    def writes(self) -> tuple[int, ...]:
        """Return nothing: a free makes no value."""
        return ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until an offload has ended: `copies` are on the host, and `sent`, on the device, end here."""

    rank: int
    sent: tuple[int, ...]
    copies: tuple[int, ...]

    def reads(self) -> tuple[int, ...]:
        """Return the values that must still be there."""
        return (*self.sent, *self.copies)

    def writes(self) -> tuple[int, ...]:
        """Return nothing: a wait makes no value."""
        return ()


Instruction = Run | Transfer | Free | Wait


@dataclass(frozen=True)
class Program:
    """Instructions in one global order that agrees with the order of every rank.

    `arguments[i]` and `results[i]` map ranks to values, and the step's captured arrays are its first arguments;
    `indices` maps (rank, microbatch) to the value of that index. The values are the numbers below `num_values`.
    """

    instructions: tuple[Instruction, ...]
    tasks: tuple[ProgramTask, ...]
    arguments: tuple[dict[int, int], ...]
    results: tuple[dict[int, int] | Any, ...]
    indices: dict[tuple[int, int], int]
    num_values: int
    num_ranks: int

    @cached_property
    def preset(self) -> dict[int, int]:
        """The values that are there before the first instruction (arguments and indices), with their ranks."""
        rank_of = {value: rank for ranks in self.arguments for rank, value in ranks.items()}
        rank_of.update({value: rank for (rank, _), value in self.indices.items()})
        return rank_of

    @cached_property
    def returned(self) -> frozenset[int]:
        """The values that are results."""
        return frozenset(v for result in self.results if isinstance(result, dict) for v in result.values())

    @cached_property
    def makers(self) -> dict[int, tuple[int, int]]:
        """For each value but the preset ones: the number of its instruction, and its position there."""
        return {v: (n, p) for n, i in enumerate(self.instructions) for p, v in enumerate(i.writes())}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """For each value that is read: the numbers of the instructions that read it, ascending."""
        numbers: dict[int, list[int]] = {}
        for number, instruction in enumerate(self.instructions):
            for value in dict.fromkeys(instruction.reads()):
                numbers.setdefault(value, []).append(number)
        return numbers

    @cached_property
    def ranks(self) -> dict[int, int]:
        """The rank of each value."""
        rank_of = dict(self.preset)
        for instruction in self.instructions:
            rank = instruction.target if isinstance(instruction, Transfer) else instruction.rank
            rank_of.update(dict.fromkeys(instruction.writes(), rank))
        return rank_of

    def maker(self, value: int) -> tuple[Run | Transfer | None, int]:
        """Return the instruction that makes a value, and its position there; no instruction for a preset value."""
        number, position = self.makers.get(value, (-1, 0))
        instruction = self.instructions[number] if number >= 0 else None
        return (instruction, position) if isinstance(instruction, Run | Transfer) else (None, 0)

    def origin(self, value: int) -> tuple[Run | None, int]:
        """Return the run that computes a value, before any transfer; no run for an argument and for its copies."""
        maker, position = self.maker(value)
        while isinstance(maker, Transfer):
            maker, position = self.maker(maker.sent[position])
        return maker, position

    @cached_property
    def donated(self) -> frozenset[int]:
        """The values whose memory a run takes over."""
        runs = (i for i in self.instructions if isinstance(i, Run))
        return frozenset(value for run in runs for value in self.taken_over(run))

    def verify(self) -> None:
        """Check all tasks; and that each value is made once, on its rank, before it is read, and not read once it ends.

        Check also that a task receives the same microbatch's values every time, and that no ranks wait for one another.

        Raises:
          VerificationError: naming the instruction and the value, or the two tasks.
        """
        for task in self.tasks:
            task.graph.verify()
        self._check_microbatches()
        self.check_waits([frozenset({rank}) for rank in range(self.num_ranks)])
        present, all_so_far = dict(self.preset), set(self.preset)
        for number, instruction in enumerate(self.instructions):
            if (fault := self._fault(instruction, present, all_so_far)) is not None:
                raise VerificationError(f"instruction {number} ({self._line(instruction)}) {fault}")
            for value in self._ended(instruction):
                del present[value]
            all_so_far.update(instruction.writes())
            rank = instruction.target if isinstance(instruction, Transfer) else instruction.rank
            present.update(dict.fromkeys(instruction.writes(), rank))
        for position, result in enumerate(self.results):
            for rank, value in result.items() if isinstance(result, dict) else ():
                if present.get(value) != rank:
                    raise VerificationError(f"result {position} is missing on rank {rank}")

    def check_waits(
        self, processes: Sequence[frozenset[int]], walks: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Check that no processes wait for one another without end, under the limits of `waits.py`.

        Args:
          processes: for each rank, the processes that have devices of it.
          walks: the numbers of the instructions in the order in which each process walks them; by default, that of the
            program.

        Raises:
          VerificationError: naming the two tasks, with their ranks and microbatches.
        """
        actions = [self._action(instruction) for instruction in self.instructions]
        if walks is None:
            processes = without_twins(processes)
            walks = walks_of(actions, processes)
        if circle := circular_wait(actions, processes, walks):
            one, other = self._what(circle[0].first), self._what(circle[0].second)
            steps = [
                f"{self._what(second)} reads what {self._what(first)} makes"
                if process is None
                else f"process {process} comes to {self._what(first)} before {self._what(second)}"
                for process, first, second in circle
            ]
            raise VerificationError(f"{one} and {other} wait for one another: {'; '.join(steps)}")

    def _action(self, instruction: Instruction) -> Action:
        makers = (self.makers.get(value) for value in instruction.reads())
        reads = tuple({maker[0] for maker in makers if maker is not None})
        if isinstance(instruction, Transfer):
            return Action(instruction.source, instruction.target, reads)
        rank = instruction.rank
        return Action(rank, rank, reads, isinstance(instruction, Run), isinstance(instruction, Wait))

    def _check_microbatches(self) -> None:
        """Check that a task's input comes from one distance of microbatches, if it comes from another rank's task."""
        first: dict[tuple[int, ...], tuple[int, Run, Run]] = {}
        for run in self.instructions:
            if not isinstance(run, Run) or run.microbatch < 0:
                continue
            for position, value in enumerate(run.inputs):
                if not isinstance(self.maker(value)[0], Transfer):
                    continue
                source, output = self.origin(value)
                if source is None or source.microbatch < 0:
                    continue  # the first carry
                distance = run.microbatch - source.microbatch
                # The first microbatch may be made by a task of its own, with other outputs.
                for key, place in ((), distance), ((source.task,), output):
                    wanted, reader, maker = first.setdefault((run.task, position, *key), (place, run, source))
                    if place != wanted:
                        this, made_by, other, maker = map(self.task_text, (run, source, reader, maker))
                        raise VerificationError(f"{this} receives what {made_by} makes, but {other} what {maker} makes")

    def _what(self, number: int) -> str:
        """Return an instruction in words, with the task that it is about."""
        instruction = self.instructions[number]
        if isinstance(instruction, Run):
            return self.task_text(instruction)
        if isinstance(instruction, Transfer) and instruction.sent:
            maker, _ = self.origin(instruction.sent[0])
            source = "an argument" if maker is None else self.task_text(maker)
            return f"the {instruction.verb} from {source} to rank {instruction.target}"
        return f"instruction {number} ({self._line(instruction)})"

    def task_text(self, run: Run) -> str:
        """Return the task that a run is of in words, with its rank, stage and microbatch."""
        task = self.tasks[run.task]
        part = "" if task.stage is None else f", stage {task.stage}"
        part += f", microbatch {run.microbatch}" if run.microbatch >= 0 else ""
        return f"task {task.name} (rank {run.rank}{part})"

    def _fault(self, instruction: Instruction, present: Mapping[int, int], all_so_far: Set[int]) -> str | None:
        """Return what is wrong with an instruction, if anything is.

        `present` has the ranks of the values that are there before it; `all_so_far` are those that have been there.
        """
        rank = instruction.source if isinstance(instruction, Transfer) else instruction.rank
        for value in (*instruction.reads(), *self._ended(instruction)):
            if present.get(value) != rank:
                return f"reads value {value}, which rank {rank} does not hold"
        if isinstance(instruction, Transfer) and len(instruction.sent) != len(instruction.received):
            return f"sends {len(instruction.sent)} values and receives {len(instruction.received)}"
        if isinstance(instruction, Run) and (other := self.tasks[instruction.task].rank) != rank:
            return f"runs a task of rank {other} on rank {rank}"
        again = next((value for value in instruction.writes() if value in all_so_far), None)
        return None if again is None else f"makes value {again} again"

    def taken_over(self, run: Run) -> tuple[int, ...]:
        """Return the values whose memory a run takes over, in the order of its inputs."""
        return tuple([run.inputs[position] for position in sorted(self.tasks[run.task].donate)])

    def _ended(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the values that end with an instruction: those that it forgets, or whose memory it takes over."""
        if isinstance(instruction, Free):
            return instruction.values
        return self.taken_over(instruction) if isinstance(instruction, Run) else ()

    def as_text(self) -> str:
        """Return one line of text for each instruction."""
        return "\n".join(map(self._line, self.instructions))

    def _line(self, instruction: Instruction) -> str:
        if isinstance(instruction, Transfer):
            sent, received = _names(instruction.sent), _names(instruction.received)
            if instruction.memory is not None:
                return f"rank {instruction.target}: {instruction.verb} {sent} to {instruction.memory} as {received}"
            return f"rank {instruction.source} -> rank {instruction.target}: send {sent} receive {received}"
        prefix = f"rank {instruction.rank}:"
        if isinstance(instruction, Wait):
            return f"{prefix} wait for {_names(instruction.copies)}"
        if isinstance(instruction, Free):
            return f"{prefix} free {_names(instruction.values)}"
        donated = self.taken_over(instruction)
        note = f" donating {_names(donated)}" if donated else ""
        inputs, outputs = _names(instruction.inputs), _names(instruction.outputs)
        microbatch = f"__{instruction.microbatch}" if instruction.microbatch >= 0 else ""
        return f"{prefix} {outputs} = {self.tasks[instruction.task].name}{microbatch}({inputs}){note}"


def _names(values: Iterable[int]) -> str:
    return ", ".join(f"v{value}" for value in values)
