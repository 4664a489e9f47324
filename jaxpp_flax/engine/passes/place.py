"""Place the work before, between and after the loops of a step on ranks.

Two walks over the equations say where each runs:

1. Forwards: which ranks can compute a value? What the loops read: the ranks of the tasks that read it. A gradient: the
   rank of its task. Other equations: the ranks that have all operands. If none has, small arrays go to large ones, and
   large arrays meet on one rank, with a warning. What is made of numbers alone (norms, rates, counters, keys) any rank
   can compute, from transferred numbers and in the program's own order, so that no schedule changes the result.
2. Backwards: which ranks need a value? Those that compute with it; of a result, those that hold the argument that it
   updates. Of the ranks that can compute a value, those that need it do; if none does, the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import jax.numpy as jnp

from jaxpp_flax.engine.analyses.equation_facts import is_small_of_large
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes.conditions import is_condition, select_between_branches
from jaxpp_flax.engine.passes.loop.loop import LoweredLoop, loops_of
from jaxpp_flax.engine.passes.loop.lower_loops import LoweredStep
from jaxpp_flax.engine.passes.misplaced_work import misplaced_work
from jaxpp_flax.engine.tracing.hints import as_copy, is_mixing_by_design, place_with_p
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, VerificationError, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.error_codes import documented
from jaxpp_flax.messages import warn_user

__all__ = ["StepOnRanks", "PlacementWarning", "ResultRanks", "place"]

_SMALL_BYTES = 1024  # a smaller value may be copied to every rank
_SENT_TO_ALL_BYTES = 1024  # a vector of losses; larger results are sent to all processes only on request


@documented("JPF903")
class PlacementWarning(UserWarning):
    """Work mixes large values of several ranks, or stands on the rank of one stage for all of them."""


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
        small = not atom.aval.shape or (atom.nbytes <= _SENT_TO_ALL_BYTES and not updated)
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
class StepOnRanks(Graph):
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
                types = ", ".join(value.aval.str_short() for value in equation.outputs)
                lines.append(f"ranks {ranks}: {equation.name} makes {types} at {equation.where}")
            lines += [
                f"move {v.aval.str_short()} from rank {source} to rank {target}"
                for v, source, target in self.sent_by(equation)
            ]
        return "\n".join(lines)


def place(
    step: LoweredStep,
    result_ranks: ResultRanks | None = None,
    idle_ranks: frozenset[int] = frozenset({0}),
    argument_ranks: Sequence[frozenset[int]] = (),
) -> StepOnRanks:
    """Choose the ranks of each outer equation.

    Args:
      step: the step's equations and loops.
      result_ranks: with several processes: the owners of each rank, and the results that all processes get.
      idle_ranks: the ranks of a result that no rank needs, and that each rank can compute by itself.
      argument_ranks: of a step without a loop: the ranks of each input, which its new value gets too; empty for an
        input that lies anywhere.
    """
    inputs, outputs = step.inputs, step.outputs
    loops = loops_of(step, LoweredLoop)
    _warn_of_loops(loops)
    placer = _Placer(step, idle_ranks, () if loops else argument_ranks)
    placer.locate()
    # If a result updates an argument that several ranks hold, all of them get the new value.
    placer.demand([frozenset()] * len(outputs))
    wanted = [frozenset(() if k is None else placer.need[inputs[k]]) for k in step.updated]
    for_all = [False] * len(outputs)
    if result_ranks is not None:
        for_all = [result_ranks.is_for_all(i, atom, wanted[i]) for i, atom in enumerate(outputs)]
        for i, atom in enumerate(outputs):
            if for_all[i]:
                wanted[i] = result_ranks.reaching_all(wanted[i] or frozenset(placer.default_ranks(atom)))
    placer.demand(wanted)
    need = {value: frozenset(ranks) for value, ranks in placer.need.items()}
    return StepOnRanks(inputs, outputs, placer.equations, placer.native, need, tuple(for_all))


class _Placer:
    def __init__(self, step: LoweredStep, idle_ranks: frozenset[int], argument_ranks: Sequence[frozenset[int]]) -> None:
        self.idle_ranks = idle_ranks
        self.inputs, self.outputs, self.sums = step.inputs, step.outputs, step.sums
        self.equations = step.equations
        self.given = {value: ranks for value, ranks in zip(step.inputs, argument_ranks, strict=False) if ranks}
        self.arguments, self.results = set(self.inputs), set(values(self.outputs))
        # Ranks that have a value without a transfer; None: any rank (each reader computes the value).
        self.location: dict[Value, frozenset[int] | None] = {}
        self.idle: set[Value] = set()  # what each rank can compute from arguments that no loop reads
        self.need: dict[Value, set[int]] = {}
        self.native: dict[Equation, frozenset[int]] = {}
        self.mixed: list[tuple[int, str]] = []

    # The ranks that can compute a value.

    def locate(self) -> None:
        wanted = _wanted_by_loops(self.equations)
        self.location = {
            value: frozenset(wanted[value]) if wanted.get(value) else self.given.get(value) for value in self.inputs
        }
        self.idle = {value for value, ranks in self.location.items() if ranks is None}
        pending, located = list(reversed(self.equations)), list[Equation]()
        while pending:
            equation = pending.pop()
            if isinstance(equation, LoweredLoop):
                self.location.update(equation.homes)
                located.append(equation)
                continue
            # A norm is computed where its array lies; a value that arrays are made of, on each rank that needs it.
            reduces = is_small_of_large(equation)
            demanded = frozenset(r for v in equation.outputs for r in wanted.get(v, ()) if not reduces)
            if not demanded and is_condition(equation) and self._mixes(equation):
                pending.extend(reversed(select_between_branches(equation)))
                continue
            location = demanded or self._locate_equation(equation)
            self.location.update(dict.fromkeys(equation.outputs, location))
            if location is None and not equation.effects and self.idle.issuperset(values(equation.inputs)):
                self.idle.update(v for v in equation.outputs if not self._is_made_once(v))
            located.append(as_copy(equation) if equation.primitive is place_with_p else equation)
        self.equations = tuple(located)
        _warn(self.mixed)

    def _anchors(self, equation: Equation) -> list[tuple[Value, frozenset[int]]]:
        return [(v, ranks) for v in values(equation.inputs) if (ranks := self.location[v]) is not None]

    def _mixes(self, equation: Equation) -> bool:
        """Return whether an equation reads several arrays, and no single rank has them all."""
        arrays = [ranks for v, ranks in self._anchors(equation) if v.aval.size > 1]
        return len(arrays) > 1 and not frozenset.intersection(*arrays)

    def _locate_equation(self, equation: Equation) -> frozenset[int] | None:
        anchored = self._anchors(equation)
        if not anchored:
            return None
        if equation.primitive is place_with_p:
            return anchored[-1][1]  # of what the value is placed with; of the value, if that lies nowhere
        arrays = [(v, holders) for v, holders in anchored if v.aval.size > 1]
        large = [(v, holders) for v, holders in arrays if v.nbytes > _SMALL_BYTES]
        # A gradient stays on its rank if a scalar of another rank scales it; small arrays move to large ones.
        for group in (anchored, arrays, large):
            if group and (common := frozenset.intersection(*(holders for _, holders in group))):
                return common
        if not arrays and equation not in self.sums:
            return None
        ranks = sorted(frozenset.union(*(holders for _, holders in large or arrays or anchored)))
        moved = {r: sum(v.nbytes for v, holders in anchored if r not in holders) for r in ranks}
        at_home = {
            r for v, holders in arrays if v in self.arguments for r in holders
        }  # an argument's new value belongs there
        best = min(ranks, key=lambda r: (moved[r], r not in at_home, r))
        if large and equation not in self.sums and not is_mixing_by_design(equation):
            what = f"`{equation.name}` at {equation.where} mixes ranks {ranks} on rank {best}"
            self.mixed.append((moved[best], what))
        return frozenset({best})

    # The ranks that compute a value, and the ranks that receive it.

    def demand(self, extra: Sequence[frozenset[int]]) -> None:
        self.need = {v: {*self.given.get(v, ())} for v in self.location}
        self.native = {}
        for atom, wanted in zip(self.outputs, extra, strict=True):
            if isinstance(atom, Value):
                self.need[atom] |= wanted or self.default_ranks(atom)
        for equation in reversed(self.equations):
            if isinstance(equation, LoweredLoop):
                for value, readers in equation.reads():
                    self.need[value] |= readers
                continue
            ranks = {rank for value in equation.outputs for rank in self._native_ranks(value)}
            if not ranks and equation.effects:
                ranks = {min((rank for _, holders in self._anchors(equation) for rank in holders), default=0)}
            self.native[equation] = frozenset(ranks)
            for value in values(equation.inputs):
                self.need[value] |= ranks

    def _native_ranks(self, value: Value) -> set[int]:
        need, location = self.need[value], self.location[value]
        if location is None or not need:
            return {min(need)} if len(need) > 1 and self._is_made_once(value) else set(need)
        return need & location or {min(location)}

    def _is_made_once(self, value: Value) -> bool:
        # Compiled into different programs, one computation may round differently: a replicated result is made once.
        return value in self.results and jnp.issubdtype(value.aval.dtype, jnp.inexact)

    def default_ranks(self, value: Atom) -> set[int]:
        """Return the ranks of a result that no other work needs."""
        location = self.location[value] if isinstance(value, Value) else None
        if location is None:
            return set(self.idle_ranks) if value in self.idle else {0}
        return set(location) if value in self.arguments else {min(location)}


def _wanted_by_loops(equations: Sequence[Equation]) -> Mapping[Value, set[int]]:
    """Find the ranks whose tasks read a value that no loop made, going backwards through the equations."""
    after_loop: set[Value] = set()
    for equation in equations:
        if isinstance(equation, LoweredLoop) or any(a in after_loop for a in equation.inputs):
            after_loop.update(equation.outputs)
    wanted: dict[Value, set[int]] = {}
    for equation in reversed(equations):
        if isinstance(equation, LoweredLoop):
            reads = list(equation.reads())
        else:
            ranks = {r for v in equation.outputs for r in wanted.get(v, ())}
            reads = [(value, ranks) for value in ([] if is_small_of_large(equation) else values(equation.inputs))]
        for value, ranks in reads:
            if value not in after_loop:
                wanted.setdefault(value, set()).update(ranks)
    return wanted


# What a user was told: a planner places one loop many times, and batches of other shapes make other loops.
_told: WeakSet[LoopBody] = WeakSet()
_said: set[str] = set()


def _warn_of_loops(loops: Sequence[LoweredLoop]) -> None:
    for loop in loops:
        misplaced = [] if loop.body in _told else list(misplaced_work(loop))
        for what in misplaced:
            _told.add(loop.body)
            if what not in _said:
                _said.add(what)
                warn_user(f"{what}.", PlacementWarning)


def _warn(mixed: Sequence[tuple[int, str]]) -> None:
    if not mixed:
        return
    listing = "; ".join(f"{what} ({moved:,} bytes)" for moved, what in mixed[:3])
    more = f"; and {len(mixed) - 3} more" if len(mixed) > 3 else ""
    warn_user(
        f"work outside the loop mixes arrays of several ranks: {listing}{more}. These "
        f"{sum(moved for moved, _ in mixed):,} bytes are transferred in every step. Keep such work inside one "
        "stage, or reduce each stage's arrays to scalars first.",
        PlacementWarning,
    )
