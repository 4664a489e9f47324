"""A step on ranks: loops, and the equations around them. `place` makes it, `unroll` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes.loop.loop import LoweredLoop, loops_of
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, VerificationError, values

__all__ = ["Placed", "ResultRanks"]


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
class Placed(Graph):
    """A step with the ranks of its work: `native` of each equation, and in `need` those that read each value.

    `for_all` marks the results that every process gets.
    """

    native: Mapping[Equation, frozenset[int]]
    need: Mapping[Value, frozenset[int]]
    for_all: tuple[bool, ...]

    @property
    def loops(self) -> tuple[LoweredLoop, ...]:
        """The loops of the step in program order."""
        return loops_of(self, LoweredLoop)

    def read_by(self, equation: Equation) -> list[tuple[Value, int]]:
        """Return what an equation reads: the values, each with a rank that reads it."""
        if isinstance(equation, LoweredLoop):
            return [(value, rank) for value, ranks in equation.reads() for rank in ranks]
        return [(value, rank) for rank in self.native[equation] for value in values(equation.inputs)]

    def made_by(self, equation: Equation) -> dict[Value, frozenset[int]]:
        """Return what an equation makes: the values, each with the ranks on which it is made."""
        if isinstance(equation, LoweredLoop):
            return equation.homes
        return dict.fromkeys(equation.outputs, self.native[equation])

    def sent_by(self, equation: Equation) -> Iterator[tuple[Value, int, int]]:
        """Yield the values of an equation that other ranks read, each with its source and a target."""
        for value, ranks in self.made_by(equation).items():
            for target in sorted(self.need[value] - ranks):
                yield value, min(ranks), target

    def verify(self) -> None:
        """Check that every rank has each value before it reads the value."""
        have = {(value, rank) for value in self.inputs for rank in self.need[value]}
        for equation in self.equations:
            if not have.issuperset(self.read_by(equation)):
                raise VerificationError(f"`{equation.name}` at {equation.where} reads what a rank does not have")
            have.update((value, rank) for value, ranks in self.made_by(equation).items() for rank in ranks)
            have.update((value, target) for value, _, target in self.sent_by(equation))

    def as_text(self, notes: Mapping[Equation, Any] | None = None) -> str:
        lines: list[str] = []
        for equation in self.equations:
            if isinstance(equation, LoweredLoop):
                lines.append(equation.headline())
            elif ranks := sorted(self.native[equation]):
                made = ", ".join(value.aval.str_short() for value in equation.outputs)
                lines.append(f"ranks {ranks}: {equation.name} makes {made} at {equation.where}")
            lines += [f"move {v.aval.str_short()} from rank {at} to rank {to}" for v, at, to in self.sent_by(equation)]
        return "\n".join(lines)
