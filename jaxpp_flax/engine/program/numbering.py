"""The program of tasks and transfers over values of a graph: each value gets a number on each rank that has it.

Loops cut by marks, tasks by hand and named computations all become such tasks and transfers, in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jaxpp_flax.engine.program.program import Instruction, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Value

__all__ = ["TaskStep", "TransferStep", "numbered", "with_transfers"]


@dataclass(frozen=True, eq=False, slots=True)
class TaskStep:
    """One run of a task, known by its number: it reads values of its rank, and makes others there."""

    task: int
    inputs: Sequence[Atom]
    outputs: Sequence[Value]
    microbatch: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class TransferStep:
    """Values that a rank sends to another one; what the target has already is not sent.

    `received` are the names of the copies on the target; by default those of the values.
    """

    source: int
    target: int
    sent: Sequence[Atom]
    received: Sequence[Value] | None = None


def with_transfers(
    runs: Sequence[TaskStep],
    tasks: Sequence[ProgramTask],
    homes: Mapping[Any, int] | None = None,
    results: Sequence[tuple[Atom, int]] = (),
) -> Iterator[TaskStep | TransferStep]:
    """Yield runs, with a transfer of each value right behind the run that makes it to each other rank that reads it.

    Args:
      runs: the runs, in an order in which they can run.
      tasks: the tasks that they run.
      homes: the ranks of arguments that are sent too, in front of the runs that read them elsewhere.
      results: what is read behind all runs, with the ranks.
    """
    home = homes or {}
    readers: dict[Atom, set[int]] = {}
    for run in runs:
        for atom in run.inputs:
            readers.setdefault(atom, set()).add(tasks[run.task].rank)
    for atom, rank in results:
        readers.setdefault(atom, set()).add(rank)
    for run in runs:
        rank = tasks[run.task].rank
        yield from _sends((atom, home.get(atom, rank), rank) for atom in run.inputs)
        yield run
        yield from _sends((value, rank, target) for value in run.outputs for target in sorted(readers.get(value, ())))
    for atom, rank in results:
        yield from _sends([(atom, home.get(atom, rank), rank)])


def _sends(moves: Iterable[tuple[Atom, int, int]]) -> Iterator[TransferStep]:
    """Yield one transfer for each source and target of values; what is there already is not sent."""
    sent: dict[tuple[int, int], list[Atom]] = {}
    for atom, source, target in moves:
        if source != target:
            sent.setdefault((source, target), []).append(atom)
    for (source, target), atoms in sent.items():
        yield TransferStep(source, target, atoms)


def numbered(
    num_ranks: int,
    tasks: Sequence[ProgramTask],
    steps: Iterable[TaskStep | TransferStep],
    arguments: Mapping[Value, Iterable[int] | None],
    results: Iterable[tuple[Atom, Iterable[int]]],
    microbatches: Mapping[Value, int] | None = None,
) -> Program:
    """Return the program of steps, which are in an order in which they can run.

    Args:
      num_ranks: the number of ranks.
      tasks: the tasks that the steps run.
      steps: the runs and the transfers.
      arguments: the ranks of each argument; None for the ranks that read it.
      results: each result, with the ranks on which it is returned.
      microbatches: the values that are the index of a microbatch, with that index.
    """
    movable = {argument for argument, ranks in arguments.items() if ranks is None}
    numbers = _Numbers(movable, {} if microbatches is None else microbatches)
    for argument, ranks in arguments.items():
        numbers.arguments[argument] = {}
        for rank in () if ranks is None else ranks:
            numbers.arguments[argument][rank] = numbers.new(argument, rank)
    instructions: list[Instruction] = []
    for step in steps:
        if isinstance(step, TaskStep):
            rank = tasks[step.task].rank
            inputs = tuple([numbers.of(value, rank) for value in step.inputs])
            outputs = tuple([numbers.new(value, rank) for value in step.outputs])
            instructions.append(Run(step.task, step.microbatch, rank, inputs, outputs))
            continue
        copies = dict(zip(step.sent if step.received is None else step.received, step.sent, strict=True))
        if missing := {copy: value for copy, value in copies.items() if (copy, step.target) not in numbers.number_of}:
            sent = tuple([numbers.of(value, step.source) for value in missing.values()])
            received = tuple([numbers.new(copy, step.target) for copy in missing])
            instructions.append(Transfer(step.source, step.target, sent, received))
    returned = [
        atom if isinstance(atom, Constant) else {rank: numbers.of(atom, rank) for rank in sorted(ranks)}
        for atom, ranks in results
    ]
    return Program(
        tuple(instructions),
        tuple(tasks),
        tuple(numbers.arguments.values()),
        tuple(returned),
        numbers.indices,
        numbers.count,
        num_ranks,
    )


@dataclass
class _Numbers:
    """The numbers given so far: of values by rank, of arguments and of the microbatches' indices.

    `movable` are the arguments that go to the ranks that read them.
    """

    movable: Set[Value]
    microbatches: Mapping[Value, int]
    number_of: dict[tuple[Atom, int], int] = field(default_factory=dict[tuple[Atom, int], int])
    arguments: dict[Value, dict[int, int]] = field(default_factory=dict[Value, dict[int, int]])
    indices: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    count: int = 0

    def new(self, value: Atom, rank: int) -> int:
        """Number a value that is made on a rank."""
        number = self.number_of[value, rank] = self.count
        self.count += 1
        return number

    def of(self, value: Atom, rank: int) -> int:
        """Return the number of a value that a rank has, or gets as an argument or as an index when it reads it."""
        if (value, rank) in self.number_of or not isinstance(value, Value):
            return self.number_of[value, rank]
        if (microbatch := self.microbatches.get(value)) is not None:
            self.indices[rank, microbatch] = self.new(value, rank)
        elif value in self.movable:
            self.arguments[value][rank] = self.new(value, rank)
        return self.number_of[value, rank]
