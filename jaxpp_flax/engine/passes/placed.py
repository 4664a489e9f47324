"""A step on ranks: loops, segments of outer equations and moves, in order. `place` makes it, `unroll` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes.loop.loop_tasks import Partition
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value, VerificationError, values
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.schedules.schedule import Schedule

__all__ = ["ResultRanks", "Loop", "Move", "Placed", "Segment"]


_SMALL_BYTES = 1024  # a vector of losses; larger results are sent to all processes only on request


@dataclass(frozen=True)
class ResultRanks:
    """The processes that own devices of each rank, and for each result whether every process must get it.

    Without a request, a result goes to all processes if it is a scalar, or if it is small and not the new value of an
    argument: a loss for each microbatch, but not the bias of a layer.

    Example:
      >>> result_ranks = ResultRanks(owners=(frozenset({0}), frozenset({0}), frozenset({1})), everywhere=(True,))
      >>> sorted(result_ranks.reaching_all(frozenset({2})))
      [0, 2]
    """

    owners: tuple[frozenset[int], ...]
    everywhere: tuple[bool, ...]

    @classmethod
    def of(cls, mesh: MpmdMesh, everywhere: Sequence[bool]) -> ResultRanks | None:
        """Make the rule for a mesh; None if one process owns the whole mesh."""
        return cls(mesh.rank_processes, tuple(everywhere)) if len(mesh.processes) > 1 else None

    def is_for_all(self, position: int, atom: Atom, updated: frozenset[int]) -> bool:
        """Return whether every process gets a result; `updated` are the ranks of the argument that it updates."""
        if not isinstance(atom, Value):  # a constant: every process makes its own
            return False
        small = not atom.aval.shape or (atom.nbytes <= _SMALL_BYTES and not updated)
        return self.everywhere[position] or small

    def reaching_all(self, ranks: frozenset[int]) -> frozenset[int]:
        """Return `ranks` and further ranks, so that every process owns one of them."""
        chosen = set(ranks)
        reached = frozenset[int]().union(*(self.owners[rank] for rank in ranks))
        for rank, owners in enumerate(self.owners):
            if not owners <= reached:
                chosen.add(rank)
                reached |= owners
        return frozenset(chosen)


@dataclass(frozen=True, eq=False)
class Loop:
    """A pipelined loop among the outer equations: outer atoms in, outer values out.

    For each accumulator, `batch_dims` gives its dimension over the shards of the batch and the mesh axes of that
    dimension (see `defer_reductions`), or None; `like` gives the position of the step's argument that it updates, or
    None. `marks` are the marks of the body, and `cuts` the indices of the marks that cut.
    """

    partition: Partition
    schedule: Schedule
    length: int
    operands: tuple[Value, ...]
    carry_init: tuple[Value, ...]
    carry_results: tuple[Value, ...]
    accumulator_results: tuple[Value, ...]
    batch_dims: tuple[Any, ...]
    like: tuple[int | None, ...] = ()
    marks: tuple[Mark, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (*self.carry_results, *self.accumulator_results)

    def rank_of_task(self, task: int) -> int:
        return self.schedule.rank_of(self.partition.tasks[task].stage)

    @cached_property
    def readers(self) -> dict[Value, set[int]]:
        """The ranks whose tasks read each value."""
        readers: dict[Value, set[int]] = {}
        for index, task in enumerate(self.partition.tasks):
            for value in task.graph.inputs:
                readers.setdefault(value, set()).add(self.rank_of_task(index))
        return readers

    def inputs(self) -> Iterable[tuple[Value, set[int]]]:
        """Yield each outer operand with the ranks that read it."""
        for operand, value in zip(self.operands, self.partition.operands, strict=True):
            yield operand, self.readers.get(value, set())
        for leaf, initial in enumerate(self.carry_init):
            owners = {self.rank_of_task(c.task) for c in self.partition.carries if c.leaf == leaf}
            states = {c.state for c in self.partition.carries if c.leaf == leaf}
            yield initial, owners.union(*(self.readers.get(s, set()) for s in states))

    @cached_property
    def homes(self) -> dict[Value, frozenset[int]]:
        """The ranks on which each outer result is made."""
        homes = {
            value: frozenset({self.rank_of_task(a.task)})
            for value, a in zip(self.accumulator_results, self.partition.accumulators, strict=True)
        }
        for leaf, value in enumerate(self.carry_results):
            homes[value] = frozenset(self.rank_of_task(c.task) for c in self.partition.carries if c.leaf == leaf)
        return homes

    def as_text(self) -> str:
        like = ", ".join("nothing" if at is None else f"argument {at}" for at in self.like)
        return f"loop over {self.length} microbatches: {type(self.schedule).__name__}; its accumulators update {like}"


@dataclass(frozen=True, eq=False)
class Segment:
    """Outer equations that one rank runs without waiting for another."""

    rank: int
    graph: Graph


@dataclass(frozen=True, eq=False)
class Move:
    """A value copied from one rank to another."""

    value: Value
    source: int
    target: int


@dataclass(frozen=True)
class Placed:
    """The step in order; `arguments` and `results` give the ranks of each input and output.

    `for_all` marks the results that every process gets.
    """

    steps: tuple[Segment | Move | Loop, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    arguments: tuple[frozenset[int], ...]
    results: tuple[frozenset[int], ...]
    for_all: tuple[bool, ...] = ()

    def verify(self) -> None:
        """Check that every rank has each value before it reads the value."""
        have = {(v, r) for v, ranks in zip(self.inputs, self.arguments, strict=True) for r in ranks}
        for step in self.steps:
            if isinstance(step, Move):
                if (step.value, step.source) not in have:
                    raise VerificationError(f"a move takes a value that rank {step.source} does not have")
                have.add((step.value, step.target))
            elif isinstance(step, Segment):
                step.graph.verify()
                if any((v, step.rank) not in have for v in step.graph.inputs):
                    raise VerificationError(f"a segment of rank {step.rank} reads what the rank does not have")
                have.update((v, step.rank) for v in values(step.graph.outputs))
            else:
                if any((value, r) not in have for value, ranks in step.inputs() for r in ranks):
                    raise VerificationError("a loop reads an operand that a rank does not have")
                have.update((v, r) for v, ranks in step.homes.items() for r in ranks)
        for atom, ranks in zip(self.outputs, self.results, strict=True):
            if isinstance(atom, Value) and any((atom, r) not in have for r in ranks):
                raise VerificationError("a result is missing on a rank")

    def as_text(self) -> str:
        lines: list[str] = []
        for step in self.steps:
            if isinstance(step, Move):
                lines.append(f"move {step.value.aval.str_short()} from rank {step.source} to rank {step.target}")
            elif isinstance(step, Segment):
                lines.append(f"rank {step.rank}:\n{step.graph.as_text()}")
            else:
                lines.append(step.as_text())
        return "\n".join(lines)
