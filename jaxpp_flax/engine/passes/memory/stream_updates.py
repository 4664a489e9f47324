"""Divide work that fetches arrays from host memory, so that a rank never has all of them on its devices at once.

An optimizer whose state lies on the host moves each leaf to the devices, updates it and moves it back. One program for
all of that may fetch every leaf before the first one leaves. So the equations around the fetches become several
programs: each has the fetches of some leaves, and what depends on them. They run one after another. XLA optimizes each
alone, so a last bit may differ from that of one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jaxpp_flax.engine.passes.placed import Placed, Segment
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, graph_of, memory_kind_of, values

__all__ = ["WINDOW_BYTES", "stream_updates"]

# Fetches stay in one program up to this number of bytes of whole arrays; a larger array is fetched alone.
WINDOW_BYTES = 64 << 20

# The place of an equation: first its level, then its group; what needs no group comes first in its level (-1).
_Place: TypeAlias = "tuple[int, int]"
_SHARED = -1


def stream_updates(placed: Placed) -> Placed:
    """Return the step with segments divided where they fetch more than a window from host memory."""
    steps: list[Any] = []
    for step in placed.steps:
        steps += _divided(step) if isinstance(step, Segment) else [step]
    return placed if len(steps) == len(placed.steps) else replace(placed, steps=tuple(steps))


def _divided(segment: Segment) -> list[Segment]:
    equations = segment.graph.equations
    if sum(map(_fetched_bytes, equations)) <= WINDOW_BYTES:
        return [segment]
    places = _Grouping(equations).places()
    _move_to_readers(segment.graph, places)
    pieces: dict[_Place, list[Equation]] = {}
    for equation in equations:
        pieces.setdefault(places[equation], []).append(equation)
    segments: list[Segment] = []
    read = set(values(segment.graph.outputs))
    for place in sorted(pieces, reverse=True):
        graph = graph_of(pieces[place], read)
        read.update(graph.inputs)
        segments.append(Segment(segment.rank, graph))
    return segments[::-1]


def _fetched_bytes(equation: Equation) -> int:
    """Return the bytes that an equation moves from the host to the devices; 0 for other equations."""
    if equation.name != "device_put":
        return 0
    moves = zip(equation.inputs, equation.outputs, strict=True)
    return sum(v.nbytes for a, v in moves if memory_kind_of(a.aval) is not None and memory_kind_of(v.aval) is None)


@dataclass
class _Grouping:
    """Finds a place for each equation of a segment.

    A fetch begins a group. An equation that reads several groups makes them one: a leaf's two moments and its update.
    But if it gives a single number, such as a norm over all leaves, the groups stay apart: the number, and what depends
    on it, come a level later, when all groups have run.
    """

    equations: Sequence[Equation]
    parent: list[int] = field(default_factory=list)  # of each group: itself, or a group that it has become part of
    sizes: list[int] = field(default_factory=list)  # the fetched bytes of each group
    level: dict[Equation, int] = field(default_factory=dict)
    member: dict[Equation, int] = field(default_factory=dict)

    def places(self) -> dict[Equation, _Place]:
        made: dict[Value, Equation] = {}
        for equation in self.equations:
            self._add(equation, [made[v] for v in values(equation.inputs) if v in made])
            made.update(dict.fromkeys(equation.outputs, equation))
        window = self._windows()
        return {
            e: (self.level[e], window[self._find(self.member[e])] if e in self.member else _SHARED)
            for e in self.equations
        }

    def _add(self, equation: Equation, before: Sequence[Equation]) -> None:
        groups = {self._find(self.member[e]) for e in before if e in self.member}
        level = max((self.level[e] for e in before), default=0)
        if fetched := _fetched_bytes(equation):
            groups.add(len(self.parent))
            self.parent.append(len(self.parent))
            self.sizes.append(fetched)
        elif len(groups) > 1 and all(value.aval.size == 1 for value in equation.outputs):
            self.level[equation] = level + 1
            return
        self.level[equation] = level
        if groups:
            self.member[equation] = self._join(groups)

    def _find(self, group: int) -> int:
        while self.parent[group] != group:
            group = self.parent[group]
        return group

    def _join(self, groups: set[int]) -> int:
        first, *others = sorted(groups)
        for other in others:
            self.parent[other] = first
            self.sizes[first] += self.sizes[other]
        return first

    def _windows(self) -> dict[int, int]:
        """Number the groups; neighbours share a number up to the window's bytes."""
        window, total, found = 0, 0, dict[int, int]()
        for group in [g for g, parent in enumerate(self.parent) if g == parent]:
            if total and total + self.sizes[group] > WINDOW_BYTES:
                window, total = window + 1, 0
            total += self.sizes[group]
            found[group] = window
        return found


def _move_to_readers(graph: Graph, places: dict[Equation, _Place]) -> None:
    """Move shared work with one reading place to that place, so that its result is not held between programs."""
    results = set(values(graph.outputs))
    readers: dict[Value, set[_Place]] = {}
    for equation in reversed(graph.equations):
        wanted = set[_Place]().union(*(readers.get(value, set()) for value in equation.outputs))
        is_kept = not results.isdisjoint(equation.outputs) or bool(equation.effects)
        if places[equation][1] == _SHARED and len(wanted) == 1 and not is_kept:
            places[equation] = wanted.pop()
        for value in values(equation.inputs):
            readers.setdefault(value, set()).add(places[equation])
