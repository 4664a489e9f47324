"""Compare the arrays of both sides, point by point, in order of computation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from jaxpp_flax.verify.classes import Case, classify
from jaxpp_flax.verify.report import Choice, Row
from jaxpp_flax.verify.rounding import FACTOR, apart, is_float, spread, unit_of, wide
from jaxpp_flax.verify.runs.points import CHOSEN, Kind, Point

__all__ = ["Side", "chosen_by", "compare", "count_choices"]

# Of one phase, first what is stacked by microbatch: it says more of a difference than a sum.
_ORDER: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Side:
    """The arrays of one run, by their points; and on the plain side, the summands of the loops' sums."""

    arrays: Mapping[Point, Any]
    parts: Mapping[Point, Any] = field(default_factory=dict)


def compare(
    plain: Side,
    others: Sequence[Side],
    pipeline: Side,
    *,
    num_microbatches: int,
    num_shards: int,
    before: Mapping[Point, Any],
) -> tuple[Row, ...]:
    """Return a row for each point of both sides, in order of computation.

    Args:
      plain: the plain step.
      others: the same step in other orders of its microbatches, or with inputs moved by one unit of rounding.
      pipeline: the pipeline's step.
      num_microbatches, num_shards: for the class of the first difference.
      before: the leaves of the state before the step, by their points after it.
    """
    both = [point for point in _shared(plain, pipeline) if point.kind not in CHOSEN]
    both.sort(key=lambda point: (point.loop, point.phase, _ORDER.index(point.kind)))
    rows: list[Row] = []
    for point in both:
        expected, actual = plain.arrays[point], pipeline.arrays[point]
        case = Case(
            expected=wide(expected),
            actual=wide(actual),
            allowed=_allowed(expected, [side.arrays[point] for side in others]),
            num_microbatches=num_microbatches,
            num_shards=num_shards,
            parts=wide(plain.parts[point]) if point in plain.parts else None,
            stacked=point.kind in ("choice", "forward", "recomputed", "backward"),
            before=wide(before[point]) if point in before else None,
            dtype=str(expected.dtype),
            is_exact=not is_float(expected),
        )
        rows.append(_row(point, case, unit_of(expected), apart(expected, actual)))
    return tuple(rows)


def chosen_by(side: Side, plain: Side) -> dict[Point, Any]:
    """Return what a side chose, as far as the plain side chose as often at the same line."""
    return {point: side.arrays[point] for point in _shared(plain, side) if point.kind in CHOSEN}


def count_choices(plain: Side, pipeline: Side) -> tuple[Choice, ...]:
    """Return how many choices differ, for each line of the program that makes some."""
    theirs = chosen_by(pipeline, plain)
    found: list[Choice] = []
    for leaf in dict.fromkeys(point.leaf for point in theirs if point.kind == CHOSEN[0]):
        first, later = ([p for p in theirs if (p.kind, p.leaf) == (kind, leaf)] for kind in CHOSEN)
        later.sort(key=lambda point: -point.region)  # regions are recomputed in reverse order of the forward pass
        pairs = zip(first, later, strict=False)
        otherwise = _count((theirs[p], theirs[q]) for p, q in pairs) if len(first) == len(later) else None
        found.append(
            Choice(
                name=leaf.rpartition("[")[0],
                count=sum(theirs[p].size for p in first),
                differ=_count((plain.arrays[p], theirs[p]) for p in first),
                recomputed=sum(theirs[p].size for p in later),
                otherwise=otherwise,
                is_at_risk=bool(later) and (otherwise != 0 or theirs[first[0]].dtype != np.bool_),
            )
        )
    return tuple(found)


def _count(pairs: Iterable[tuple[Any, Any]]) -> int:
    return sum(int(np.count_nonzero(apart(one, other))) for one, other in pairs)


def _shared(plain: Side, other: Side) -> list[Point]:
    """Return the points of both sides; none of those of a name of which one side has more: they would be mixed up."""
    uneven = {(point.kind, point.leaf) for point in plain.arrays.keys() ^ other.arrays.keys()}
    return [point for point in plain.arrays if (point.kind, point.leaf) not in uneven]


def _allowed(expected: Any, others: Sequence[Any]) -> float:
    """Return how far rounding explains a difference of this leaf."""
    return FACTOR * max(spread(expected, others), unit_of(expected))


def _row(point: Point, case: Case, unit: float, difference: np.ndarray) -> Row:
    if not difference.size:
        return Row(
            kind=point.kind, block=point.block, leaf=point.leaf, index=(), expected=0, actual=0, distance=0, allowed=0
        )
    where = np.unravel_index(int(np.argmax(difference)), difference.shape)
    unit = unit or 1.0
    distance, allowed = float(difference[where]) / unit, case.allowed / unit
    return Row(
        kind=point.kind,
        block=point.block,
        leaf=point.leaf,
        index=tuple(map(int, where)),
        expected=float(case.expected[where].real),
        actual=float(case.actual[where].real),
        distance=distance,
        allowed=allowed,
        likely=classify(case) if distance > allowed else "",
    )
