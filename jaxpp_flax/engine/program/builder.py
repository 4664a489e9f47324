"""Writes a program: one builder for loops cut by marks, for tasks by hand, and for named computations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpp_flax.engine.program.program import Instruction, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Value

__all__ = ["ProgramBuilder"]


@dataclass
class ProgramBuilder:
    """A program while it is written.

    Attributes:
      num_ranks: the number of ranks.
      at: the program's value of an edge (an `ir.Value`) on a rank.
      arguments: for each argument, its value on each rank that has it.
      results: as in `Program`.
    """

    num_ranks: int
    at: dict[tuple[Atom, int], int] = field(default_factory=dict)
    arguments: dict[Value, dict[int, int]] = field(default_factory=dict)
    results: list[dict[int, int] | Constant] = field(default_factory=list[Any])
    instructions: list[Instruction] = field(default_factory=list)
    tasks: list[ProgramTask] = field(default_factory=list)
    indices: dict[tuple[int, int], int] = field(default_factory=dict)
    num_values: int = 0

    def new(self, count: int) -> tuple[int, ...]:
        """Return so many new values."""
        first, self.num_values = self.num_values, self.num_values + count
        return tuple(range(first, self.num_values))

    def argument(self, edge: Value, ranks: Iterable[int]) -> None:
        """Add an argument of the program that lies on these ranks."""
        found = self.arguments.setdefault(edge, {})
        for rank in ranks:
            (value,) = self.new(1)
            found[rank] = self.at[edge, rank] = value

    def values_of(self, edges: Iterable[Atom], rank: int) -> tuple[int, ...]:
        """Return the values of edges on a rank that has them."""
        return tuple([self.at[edge, rank] for edge in edges])

    def index(self, rank: int, microbatch: int) -> int:
        """Return the value of a microbatch's index on a rank."""
        if (rank, microbatch) not in self.indices:
            (self.indices[rank, microbatch],) = self.new(1)
        return self.indices[rank, microbatch]

    def task(self, task: ProgramTask) -> int:
        """Add a task, and return its number."""
        self.tasks.append(task)
        return len(self.tasks) - 1

    def run(self, task: int, inputs: Sequence[int], microbatch: int = -1) -> tuple[int, ...]:
        """Run a task on values, and return the values that it makes."""
        outputs = self.new(len(self.tasks[task].graph.outputs))
        self.instructions.append(Run(task, microbatch, self.tasks[task].rank, tuple(inputs), outputs))
        return outputs

    def run_on(self, task: int, reads: Iterable[Atom], makes: Sequence[Atom], microbatch: int = -1) -> None:
        """Run a task on edges of its rank; it makes other edges there."""
        rank = self.tasks[task].rank
        made = self.run(task, self.values_of(reads, rank), microbatch)
        self.at.update(zip([(edge, rank) for edge in makes], made, strict=True))

    def transfer(self, source: int, target: int, sent: Sequence[int]) -> tuple[int, ...]:
        """Send values, and return their copies."""
        received = self.new(len(sent))
        self.instructions.append(Transfer(source, target, tuple(sent), received))
        return received

    def send(self, edges: Iterable[Atom], source: int, target: int) -> None:
        """Send the edges that the target lacks."""
        if missing := [edge for edge in dict.fromkeys(edges) if (edge, target) not in self.at]:
            received = self.transfer(source, target, self.values_of(missing, source))
            self.at.update(zip([(edge, target) for edge in missing], received, strict=True))

    def result(self, atom: Atom, ranks: Iterable[int]) -> None:
        """Add a result of the program: a constant, or an edge as it lies on these ranks."""
        on_ranks = {rank: self.at[atom, rank] for rank in sorted(ranks)} if isinstance(atom, Value) else atom
        self.results.append(on_ranks)

    def finish(self) -> Program:
        """Return the program."""
        return Program(
            tuple(self.instructions),
            tuple(self.tasks),
            tuple(self.arguments.values()),
            tuple(self.results),
            dict(self.indices),
            self.num_values,
            self.num_ranks,
        )
