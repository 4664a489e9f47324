"""Compare the arrays of both sides, point by point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpp_flax.verify.classes import Case, classify
from jaxpp_flax.verify.report import Choice, Row
from jaxpp_flax.verify.rounding import FACTOR, apart, is_float, spread, unit_of, wide
from jaxpp_flax.verify.runs.points import CHOSEN, Point

__all__ = ["Side", "compare", "count_choices"]


@dataclass(frozen=True)
class Side:
    """The arrays of one run of a piece, by their points; and on the plain side, the summands of the loops' sums."""

    arrays: Mapping[Point, Any]
    parts: Mapping[Point, Any] = field(default_factory=dict)


def compare(
    plain: Side,
    others: Sequence[Side],
    actual: Mapping[Point, Any],
    *,
    num_microbatches: int,
    num_shards: int,
    before: Mapping[Point, Any],
    process: int,
) -> dict[Point, tuple[Row, float]]:
    """Return a row for each point of a piece, choices aside, and how far the plain side itself is spread there.

    Args:
      plain: the plain side.
      others: the same piece with another order of its microbatches, or with inputs moved by one unit of rounding.
      actual: the arrays of the pipeline.
      num_microbatches, num_shards: for the class of the first difference.
      before: the leaves of the state before the step, by their points after it.
      process: the process that holds the arrays.
    """
    found: dict[Point, tuple[Row, float]] = {}
    for point, expected in plain.arrays.items():
        if point.kind in CHOSEN:
            continue
        unit = unit_of(expected)
        apart_by = spread(expected, [side.arrays[point] for side in others])
        case = Case(
            expected=wide(expected),
            actual=wide(actual[point]),
            allowed=FACTOR * max(apart_by, unit),
            num_microbatches=num_microbatches,
            num_shards=num_shards,
            parts=wide(plain.parts[point]) if point in plain.parts else None,
            stacked=point.kind in ("choice", "forward", "recomputed", "backward"),
            before=wide(before[point]) if point in before else None,
            dtype=str(expected.dtype),
            is_exact=not is_float(expected),
        )
        found[point] = _row(point, case, unit, apart(expected, actual[point]), process), apart_by
    return found


def count_choices(plain: Mapping[Point, Any], actual: Mapping[Point, Any]) -> list[Choice]:
    """Return how many choices differ, for each line of the program that makes some."""
    found: list[Choice] = []
    for leaf in dict.fromkeys(point.leaf for point in plain if point.kind == CHOSEN[0]):
        first, later = ([p for p in plain if (p.kind, p.leaf) == (kind, leaf)] for kind in CHOSEN)
        later.sort(key=lambda point: -point.region)  # regions are recomputed in reverse order of the forward pass
        pairs = zip(first, later, strict=False)
        otherwise = _count((actual[p], actual[q]) for p, q in pairs) if len(first) == len(later) else None
        found.append(
            Choice(
                name=leaf.rpartition("[")[0],
                count=sum(actual[p].size for p in first),
                differ=_count((plain[p], actual[p]) for p in first),
                recomputed=sum(actual[p].size for p in later),
                otherwise=otherwise,
                is_at_risk=bool(later) and (otherwise != 0 or actual[first[0]].dtype != np.bool_),
            )
        )
    return found


def _count(pairs: Iterable[tuple[Any, Any]]) -> int:
    return sum(int(np.count_nonzero(apart(one, other))) for one, other in pairs)


def _row(point: Point, case: Case, unit: float, difference: np.ndarray, process: int) -> Row:
    index: tuple[int, ...] = ()
    expected, actual, distance, allowed = 0.0, 0.0, 0.0, 0.0
    if difference.size:
        where = np.unravel_index(int(np.argmax(difference)), difference.shape)
        index, unit = tuple(map(int, where)), unit or 1.0
        expected, actual = float(case.expected[where].real), float(case.actual[where].real)
        distance, allowed = float(difference[where]) / unit, case.allowed / unit
    return Row(
        kind=point.kind,
        block=point.block,
        leaf=point.leaf,
        index=index,
        expected=expected,
        actual=actual,
        distance=distance,
        allowed=allowed,
        likely=classify(case) if distance > allowed else "",
        process=process,
    )
