"""A step on ranks: loops, and the equations around them. `place` makes it, `unroll` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes.loop.loop_tasks import Partition
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, VerificationError, values
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.schedules.schedule import Schedule

__all__ = ["Loop", "Placed", "ResultRanks"]


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
class Placed:
    """A step with the ranks of its work: `native` of each equation, and in `need` those that read each value.

    `for_all` marks the results that every process gets.
    """

    nodes: tuple[Equation | Loop, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    native: Mapping[Equation, frozenset[int]]
    need: Mapping[Value, frozenset[int]]
    for_all: tuple[bool, ...]

    def reads(self, node: Equation | Loop) -> list[tuple[Value, int]]:
        """Return what an equation or a loop reads: the values, each with a rank that reads it."""
        if isinstance(node, Loop):
            return [(value, rank) for value, ranks in node.inputs() for rank in ranks]
        return [(value, rank) for rank in self.native[node] for value in values(node.inputs)]

    def makes(self, node: Equation | Loop) -> dict[Value, frozenset[int]]:
        """Return what an equation or a loop makes: the values, each with the ranks on which it is made."""
        return node.homes if isinstance(node, Loop) else dict.fromkeys(node.outputs, self.native[node])

    def sent(self, node: Equation | Loop) -> Iterator[tuple[Value, int, int]]:
        """Yield the values of an equation or a loop that other ranks read, each with its source and a target."""
        for value, ranks in self.makes(node).items():
            for target in sorted(self.need[value] - ranks):
                yield value, min(ranks), target

    def verify(self) -> None:
        """Check that every rank has each value before it reads the value."""
        have = {(value, rank) for value in self.inputs for rank in self.need[value]}
        for node in self.nodes:
            if not have.issuperset(self.reads(node)):
                what = "a loop" if isinstance(node, Loop) else f"`{node.name}` at {node.where}"
                raise VerificationError(f"{what} reads what a rank does not have")
            have.update((value, rank) for value, ranks in self.makes(node).items() for rank in ranks)
            have.update((value, target) for value, _, target in self.sent(node))

    def as_text(self) -> str:
        lines: list[str] = []
        for node in self.nodes:
            if isinstance(node, Loop):
                lines.append(node.as_text())
            elif ranks := sorted(self.native[node]):
                made = ", ".join(value.aval.str_short() for value in node.outputs)
                lines.append(f"ranks {ranks}: {node.name} makes {made} at {node.where}")
            lines += [f"move {v.aval.str_short()} from rank {at} to rank {to}" for v, at, to in self.sent(node)]
        return "\n".join(lines)
