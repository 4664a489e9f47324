"""Compare the arrays of both sides, point by point, in order of computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpp_flax.verify.classes import Case, classify
from jaxpp_flax.verify.report import Row
from jaxpp_flax.verify.rounding import FACTOR, apart, is_float, spread, unit_of, wide
from jaxpp_flax.verify.runs.points import Point

__all__ = ["Side", "compare"]

# Of one phase, first what is stacked by microbatch: it says more of a difference than a sum.
_ORDER = ("forward", "result", "carry", "backward", "gradient", "metric", "state")


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
    both = [point for point in plain.arrays if point in pipeline.arrays]
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
            stacked=point.kind in ("forward", "backward"),
            before=wide(before[point]) if point in before else None,
            dtype=str(expected.dtype),
            is_exact=not is_float(expected),
        )
        rows.append(_row(point, case, unit_of(expected), apart(expected, actual)))
    return tuple(rows)


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
