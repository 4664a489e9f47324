"""Place the work before, between and after the loops of a step on ranks.

A value lives on the ranks that need it: a parameter on the ranks whose tasks read it, its gradient and its optimizer
update on the first of these. Small values that mix ranks (norms, finite checks, learning rates, keys) are computed on
every rank that reads them, from transferred scalars and in the program's own order. So the result depends neither on
the schedule nor on the number of stages. Larger values that mix ranks are computed on one rank, with a warning.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from jaxpp_flax.engine.passes.loop.lower_loops import Lowered
from jaxpp_flax.engine.passes.placed import Loop, Move, Placed, ResultRanks, Segment
from jaxpp_flax.engine.passes.split_conditions import is_condition, select_between_branches
from jaxpp_flax.engine.tracing.hints import as_copy, is_mixing_by_design, place_with_p
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.error_codes import documented

__all__ = ["PlacementWarning", "place"]

_SMALL_BYTES = 1024  # a smaller value may be copied to every rank
_SEARCH_DEPTH = 12  # equations between a parameter and its updated value, at most

# Loops passed, and waits for other ranks since then.
Time = tuple[int, int]
_END_OF_LOOP = 1 << 30


@documented("JPF903")
class PlacementWarning(UserWarning):
    """Work outside the loop mixes large values of several ranks."""


def place(
    step: Lowered, result_ranks: ResultRanks | None = None, idle_ranks: frozenset[int] = frozenset({0})
) -> Placed:
    """Choose the ranks of each outer equation.

    Args:
      step: the step's equations and loops.
      result_ranks: with several processes: the owners of each rank, and the results that all processes get.
      idle_ranks: the ranks of a result that no rank needs, and that each rank can compute by itself.
    """
    outputs = step.outputs
    placer = _Placer(step, idle_ranks)
    placer.locate()
    # If a result updates an argument that several ranks hold, all of them get the new value.
    placer.demand([frozenset()] * len(outputs))
    wanted = [placer.ranks_of_updated(atom) for atom in outputs]
    for_all = [False] * len(outputs)
    if result_ranks is not None:
        for_all = [result_ranks.is_for_all(i, atom, wanted[i]) for i, atom in enumerate(outputs)]
        for i, atom in enumerate(outputs):
            if for_all[i]:
                wanted[i] = result_ranks.reaching_all(wanted[i] or frozenset(placer.default_ranks(atom)))
    placer.demand(wanted)
    return replace(placer.emit(), for_all=tuple(for_all))


class _Placer:
    def __init__(self, step: Lowered, idle_ranks: frozenset[int]) -> None:
        self.idle_ranks = idle_ranks
        self.nodes, self.inputs, self.outputs, self.sums = step.nodes, step.inputs, step.outputs, step.sums
        self.results = set(values(self.outputs))
        self.producer = {v: node for node in self.nodes for v in node.outputs}
        self.loops = [node for node in self.nodes if isinstance(node, Loop)]
        # Ranks that have a value without a transfer; None: any rank (each reader computes the value).
        self.location: dict[Value, frozenset[int] | None] = {}
        self.need: dict[Value, set[int]] = {}
        self.native: dict[Equation, frozenset[int]] = {}
        self.mixed: list[tuple[int, str]] = []

    # The ranks that can compute a value.

    def locate(self) -> None:
        wanted = self._wanted_by_loops()
        for value in self.inputs:
            self.location[value] = frozenset(wanted[value]) if wanted.get(value) else None
        pending, located = list(reversed(self.nodes)), []
        while pending:
            node = pending.pop()
            if isinstance(node, Loop):
                self.location.update(node.homes)
                located.append(node)
                continue
            demanded = {r for v in node.outputs for r in wanted.get(v, ())}
            if not demanded and is_condition(node) and self._mixes(node):
                pending.extend(reversed(select_between_branches(node)))
                continue
            location = frozenset(demanded) if demanded else self._locate_equation(node)
            self.location.update(dict.fromkeys(node.outputs, location))
            located.append(as_copy(node) if node.primitive is place_with_p else node)
        self.nodes = located
        self.producer = {v: node for node in located for v in node.outputs}
        self.idle = self._find_idle()
        self._warn()

    def _find_idle(self) -> set[Value]:
        """Find the values that each rank can compute from arguments that no loop reads, without a transfer."""
        idle = {value for value in self.inputs if self.location[value] is None}
        for node in self.nodes:
            if isinstance(node, Loop) or node.effects or not idle.issuperset(values(node.inputs)):
                continue
            idle.update(v for v in node.outputs if self.location[v] is None and not self._is_made_once(v))
        return idle

    def _wanted_by_loops(self) -> dict[Value, set[int]]:
        """Find the ranks whose tasks read a value that no loop made, going backwards through the equations."""
        after_loop: set[Value] = set()
        for node in self.nodes:
            if isinstance(node, Loop) or any(a in after_loop for a in node.inputs):
                after_loop.update(node.outputs)
        wanted: dict[Value, set[int]] = {}
        for node in reversed(self.nodes):
            if isinstance(node, Loop):
                reads = list(node.inputs())
            else:
                ranks = {r for v in node.outputs for r in wanted.get(v, ())}
                reads = [(value, ranks) for value in values(node.inputs)]
            for value, ranks in reads:
                if value not in after_loop:
                    wanted.setdefault(value, set()).update(ranks)
        return wanted

    def _anchors(self, equation: Equation) -> list[tuple[Value, frozenset[int]]]:
        return [(v, at) for v in values(equation.inputs) if (at := self.location[v]) is not None]

    def _mixes(self, equation: Equation) -> bool:
        """Return whether an equation reads several arrays, and no single rank has them all."""
        arrays = [at for v, at in self._anchors(equation) if v.aval.size > 1]
        return len(arrays) > 1 and not frozenset.intersection(*arrays)

    def _locate_equation(self, equation: Equation) -> frozenset[int] | None:
        if equation.primitive is place_with_p:
            value, like = equation.inputs
            for atom in (like, value):
                if isinstance(atom, Value) and self.location[atom] is not None:
                    return self.location[atom]
        anchored = self._anchors(equation)
        if not anchored:
            return None
        common = frozenset.intersection(*(at for _, at in anchored))
        if equation in self.sums:
            return frozenset({min(common or frozenset.union(*(at for _, at in anchored)))})
        if common:
            return common
        arrays = [(v, at) for v, at in anchored if v.aval.size > 1]
        if not arrays:
            return None
        large = [(v, at) for v, at in arrays if v.nbytes > _SMALL_BYTES]
        # A gradient stays on its rank if a scalar of another rank scales it; small arrays move to large ones.
        for group in (arrays, large):
            if group and (common := frozenset.intersection(*(at for _, at in group))):
                return common
        ranks = sorted(frozenset.union(*(at for _, at in large or arrays)))
        moved = {r: sum(v.nbytes for v, at in anchored if r not in at) for r in ranks}
        at_home = {r for v, at in arrays if v not in self.producer for r in at}  # an argument's new value belongs there
        best = min(ranks, key=lambda r: (moved[r], r not in at_home, r))
        if large and not is_mixing_by_design(equation):
            what = f"`{equation.name}` at {equation.where} mixes ranks {ranks} on rank {best}"
            self.mixed.append((moved[best], what))
        return frozenset({best})

    def _warn(self) -> None:
        if not self.mixed:
            return
        listing = "; ".join(f"{what} ({moved:,} bytes)" for moved, what in self.mixed[:3])
        more = f"; and {len(self.mixed) - 3} more" if len(self.mixed) > 3 else ""
        warnings.warn(
            f"work outside the loop mixes arrays of several ranks: {listing}{more}. These "
            f"{sum(moved for moved, _ in self.mixed):,} bytes are transferred in every step. Keep such work inside one "
            "stage, or reduce each stage's arrays to scalars first.",
            PlacementWarning,
            stacklevel=2,
        )

    # The ranks that compute a value, and the ranks that receive it.

    def demand(self, extra: Sequence[frozenset[int]]) -> None:
        self.need = {v: set() for v in self.location}
        self.native = {}
        for atom, wanted in zip(self.outputs, extra, strict=True):
            if isinstance(atom, Value):
                self.need[atom] |= wanted or self.default_ranks(atom)
        for node in reversed(self.nodes):
            if isinstance(node, Loop):
                for value, readers in node.inputs():
                    self.need[value] |= readers
                continue
            ranks = {rank for value in node.outputs for rank in self._native_ranks(value)}
            if not ranks and node.effects:
                ranks = {min((rank for _, at in self._anchors(node) for rank in at), default=0)}
            self.native[node] = frozenset(ranks)
            for value in values(node.inputs):
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
        return {min(location)} if value in self.producer else set(location)

    def ranks_of_updated(self, atom: Atom) -> frozenset[int]:
        """Return the ranks of the nearest argument of the same type from which a result is computed."""
        if not isinstance(atom, Value):
            return frozenset()
        queue: deque[tuple[Atom, int]] = deque([(atom, 0)])
        seen: set[Atom] = set()
        arguments = set(self.inputs)
        while queue:
            current, depth = queue.popleft()
            if not isinstance(current, Value) or current in seen:
                continue
            seen.add(current)
            if current in arguments:
                same = current.aval.shape == atom.aval.shape and current.aval.dtype == atom.aval.dtype
                if same and self.need[current]:
                    return frozenset(self.need[current])
            node = self.producer.get(current)
            if isinstance(node, Equation) and depth < _SEARCH_DEPTH:
                queue.extend((a, depth + 1) for a in node.inputs)
            elif isinstance(node, Loop) and current in node.carry_results:
                queue.append((node.carry_init[node.carry_results.index(current)], depth + 1))
        return frozenset()

    # The order of the steps.

    def emit(self) -> Placed:
        made = self._earliest_times()
        moves: dict[tuple[Value, int], tuple[int, Time]] = {}
        for value, ranks in self.need.items():
            if value not in self.producer:
                continue
            native = self._made_on(value)
            source = min(native) if native else 0
            for target in sorted(ranks - native):
                moves[value, target] = (source, made[value, source])
        times = self._latest_times(made, moves)
        steps: list[tuple[Time, int, int, Segment | Move | Loop]] = []
        groups: dict[tuple[Time, int], list[Equation]] = {}
        for node in self.nodes:
            if isinstance(node, Equation):
                for rank in self.native[node]:
                    groups.setdefault((times[node, rank], rank), []).append(node)
        read_by = self._outside_readers(times)
        for (time, rank), equations in groups.items():
            steps.append((time, 0, rank, Segment(rank, _segment_graph(equations, rank, read_by))))
        for (value, target), (source, time) in moves.items():
            node = self.producer[value]
            at = times[node, source] if isinstance(node, Equation) else time
            steps.append((at, 1, target, Move(value, source, target)))
        for epoch, loop in enumerate(self.loops):
            steps.append(((epoch, _END_OF_LOOP), 0, -1, loop))
        steps.sort(key=lambda item: item[:3])
        results = tuple(frozenset(self.need[a]) if isinstance(a, Value) else frozenset({0}) for a in self.outputs)
        arguments = tuple(frozenset(self.need[v]) for v in self.inputs)
        return Placed(tuple(s for *_, s in steps), self.inputs, self.outputs, arguments, results)

    def _made_on(self, value: Value) -> set[int]:
        node = self.producer[value]
        return set(self.native[node]) if isinstance(node, Equation) else set(node.homes[value])

    def _earliest_times(self) -> dict[tuple[Value, int], Time]:
        """Return the earliest time of each value on each rank."""
        at: dict[tuple[Value, int], Time] = {}
        epoch = 0
        for node in self.nodes:
            if isinstance(node, Loop):
                for value, ranks in node.homes.items():
                    at.update({(value, rank): (epoch, _END_OF_LOOP) for rank in ranks})
                epoch += 1
                continue
            for rank in self.native[node]:
                at.update(dict.fromkeys([(v, rank) for v in node.outputs], self._start(node, rank, at)))
        return at

    def _start(self, node: Equation, rank: int, at: dict[tuple[Value, int], Time]) -> Time:
        """Return the earliest time at which a rank has the operands of an equation."""
        made = [v for v in values(node.inputs) if v in self.producer]
        return max((self._arrival(v, rank, at) for v in made), default=(0, 0))

    def _arrival(self, value: Value, rank: int, at: dict[tuple[Value, int], Time]) -> Time:
        waits = (value, rank) not in at
        epoch, level = at[value, min(self._made_on(value)) if waits else rank]
        return (epoch + 1, 0) if level == _END_OF_LOOP else (epoch, level + waits)

    def _latest_times(
        self, at: dict[tuple[Value, int], Time], moves: dict[tuple[Value, int], tuple[int, Time]]
    ) -> dict[tuple[Equation, int], Time]:
        """Move work as late as its readers on the same rank allow: fewer values live across a wait."""
        fixed = {(value, source) for (value, _), (source, _) in moves.items()}
        fixed |= self._read_by_loops_and_results()
        latest: dict[tuple[Value, int], Time] = {}
        times: dict[tuple[Equation, int], Time] = {}
        for node in reversed(self.nodes):
            if isinstance(node, Loop):
                continue
            for rank in self.native[node]:
                uses = [latest[v, rank] for v in node.outputs if (v, rank) in latest]
                keep = not uses or any((v, rank) in fixed for v in node.outputs)
                time = at[node.outputs[0], rank] if node.outputs else self._start(node, rank, at)
                times[node, rank] = time = time if keep else max(time, min(uses))
                for value in values(node.inputs):
                    latest[value, rank] = min(latest.get((value, rank), time), time)
        return times

    def _read_by_loops_and_results(self) -> set[tuple[Value, int]]:
        read = {(v, rank) for v in self.results for rank in self.need[v]}
        return read.union((v, rank) for loop in self.loops for v, ranks in loop.inputs() for rank in ranks)

    def _outside_readers(self, times: dict[tuple[Equation, int], Time]) -> set[tuple[Value, int]]:
        """Return the values (with their rank) that are read outside the segment that makes them."""
        read = self._read_by_loops_and_results()
        for node, ranks in self.native.items():
            for value in values(node.inputs):
                made = self.producer.get(value)
                if isinstance(made, Equation):
                    read.update((value, r) for r in ranks if times.get((made, r)) != times[node, r])
        for value, ranks in self.need.items():
            node = self.producer.get(value)
            if isinstance(node, Equation) and ranks - self.native[node]:
                read.add((value, min(self.native[node])))
        return read


def _segment_graph(equations: Sequence[Equation], rank: int, read_by: set[tuple[Value, int]]) -> Graph:
    defined = {v for e in equations for v in e.outputs}
    inputs = dict.fromkeys(v for e in equations for v in values(e.inputs) if v not in defined)
    outputs = tuple(v for e in equations for v in e.outputs if (v, rank) in read_by)
    return Graph(tuple(inputs), outputs, tuple(equations))
