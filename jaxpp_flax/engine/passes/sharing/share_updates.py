"""Divide the ranks' updates into a part that all ranks have and a rest, so that XLA compiles the common part once.

The first rank updates an embedding beside its layers, the last one a head: each rank's update would be a program of its
own, although most of their leaves are alike. An update falls into pieces that share no array, such as a leaf with its
moments. The pieces that all ranks have, with the same types and operations, become one program in the same order on
each rank; the other pieces of a rank, if it has any, become a second one. Numbers that several pieces read (a bias
correction) are computed in each of the programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import groupby
from operator import and_, itemgetter
from typing import Any, TypeAlias

from jaxpp_flax.engine.passes.placed import Placed, Segment
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, graph_of, producers, values

__all__ = ["share_updates"]

# A rank starts one program more in each step, so a common part must be worth it: XLA takes about 1 ms an equation.
_FEWEST_EQUATIONS = 100

_Piece: TypeAlias = "tuple[Equation, ...]"


def share_updates(placed: Placed, keys: Fingerprinter) -> Placed:
    """Return the step with neighbouring segments of different ranks divided where they have much in common."""
    steps: list[Any] = []
    for are_segments, run in groupby(placed.steps, key=lambda step: isinstance(step, Segment)):
        found: list[Any] = list(run)
        steps += _divided(found, keys) if are_segments else found
    return placed if steps == list(placed.steps) else replace(placed, steps=tuple(steps))


def _divided(segments: list[Segment], keys: Fingerprinter) -> list[Segment]:
    if len(segments) < 2 or len({s.rank for s in segments}) < len(segments):
        return segments
    if min(len(s.graph.equations) for s in segments) < _FEWEST_EQUATIONS:
        return segments
    divisions = list(map(_Division.of, segments))
    by_key = [[(keys.graph(d.graph([piece])), piece) for piece in d.pieces] for d in divisions]
    counts = [Counter(key for key, _ in found) for found in by_key]
    common = reduce(and_, counts)
    if all(count == common for count in counts):
        return segments
    divided: list[Segment] = []
    for division, found in zip(divisions, by_key, strict=True):
        left, shared, rest = common.copy(), list[tuple[int, _Piece]](), list[_Piece]()
        for key, piece in found:
            if left[key]:
                left[key] -= 1
                shared.append((key, piece))
            else:
                rest.append(piece)
        shared.sort(key=itemgetter(0))  # the same order on each rank
        parts = [[piece for _, piece in shared], rest]
        if sum(map(len, parts[0])) < _FEWEST_EQUATIONS:
            return segments
        divided += [Segment(division.segment.rank, division.graph(part)) for part in parts if part]
    return divided


@dataclass(frozen=True)
class _Division:
    """A segment and its pieces: equations that share no array with other pieces.

    `numbers` are equations that compute single numbers from single numbers; a piece that reads them repeats them. Those
    that make results of the segment are the last piece.
    """

    segment: Segment
    pieces: tuple[_Piece, ...]
    numbers: frozenset[Equation]

    @classmethod
    def of(cls, segment: Segment) -> _Division:
        equations = segment.graph.equations
        made: dict[Value, Equation] = {}
        parent: dict[Equation, Equation] = {}  # itself, or an earlier equation of its piece

        def find(equation: Equation) -> Equation:
            while parent[equation] is not equation:
                parent[equation] = equation = parent[parent[equation]]
            return equation

        for equation in equations:
            read = [(v, made.get(v)) for v in values(equation.inputs)]
            made.update(dict.fromkeys(equation.outputs, equation))
            if _is_number(equation) and all(v.aval.size == 1 if e is None else e not in parent for v, e in read):
                continue
            parent[equation] = equation
            for before in [e for _, e in read if e in parent]:
                parent[find(before)] = find(equation)
        pieces: dict[Equation, list[Equation]] = {}
        for equation in parent:
            pieces.setdefault(find(equation), []).append(equation)
        numbers = frozenset(e for e in equations if e not in parent)
        results = dict.fromkeys(made[v] for v in values(segment.graph.outputs) if made.get(v) in numbers)
        return cls(segment, (*map(tuple, pieces.values()), *([tuple(results)] if results else [])), numbers)

    @cached_property
    def _numbers_made(self) -> dict[Value, Equation]:
        return producers(self.numbers)

    @cached_property
    def _order(self) -> dict[Equation, int]:
        return {equation: place for place, equation in enumerate(self.segment.graph.equations)}

    @cached_property
    def _results(self) -> frozenset[Value]:
        return frozenset(values(self.segment.graph.outputs))

    def graph(self, part: Sequence[_Piece]) -> Graph:
        """Return the graph of some pieces, with the numbers that they read."""
        own = dict.fromkeys(e for piece in part for e in piece)
        made, order = self._numbers_made, self._order
        read, needed = list(own), self.numbers.intersection(own)
        while read:
            found = {made[v] for v in values(read.pop().inputs) if v in made} - needed
            needed |= found
            read += found
        results = {v for e in own for v in e.outputs if v in self._results}
        first = sorted(needed, key=order.__getitem__)
        return graph_of((*first, *(e for e in own if e not in needed)), results)


def _is_number(equation: Equation) -> bool:
    return not equation.effects and all(value.aval.size == 1 for value in equation.outputs)
