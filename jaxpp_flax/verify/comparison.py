"""Compare what a piece of the plain step makes with what the pipeline made, point by point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpp_flax.verify.classes import Case, classify
from jaxpp_flax.verify.errors import VerifyError
from jaxpp_flax.verify.report import Choice, Row
from jaxpp_flax.verify.rounding import FACTOR, apart, is_float, moved, spread, unit_of, wide
from jaxpp_flax.verify.runs.pieces import Name, Piece
from jaxpp_flax.verify.runs.points import CHOSEN, Point

__all__ = ["Comparison", "compare", "row_of", "run_twice"]


@dataclass(frozen=True)
class Comparison:
    """For each point of a piece, choices aside: a row, and how far rounding spreads the plain side; and the choices."""

    rows: list[Row]
    spreads: list[float]
    choices: list[Choice]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Comparison:
        """Make one of what JSON makes of its fields."""
        rows = [Row(**{**row, "index": tuple(row["index"])}) for row in fields["rows"]]
        return cls(rows, fields["spreads"], [Choice(**choice) for choice in fields["choices"]])


def compare(
    piece: Piece,
    arrays: Mapping[Name, Any],
    actual: Mapping[Point, Any],
    before: Mapping[Point, Any],
    spreads: Mapping[Any, float],
    *,
    num_microbatches: int,
    num_shards: int,
    process: int,
) -> Comparison:
    """Run a piece four times, and compare it with the pipeline.

    It runs once more if it calls the host, once more, by microbatch, if a sum is wrong, and twice more if it rounds to
    levels, as quantised products do.

    Args:
      piece: the piece.
      arrays: what it reads.
      actual: what the pipeline made at its points.
      before: the leaves of the state before the step, by their points after it.
      spreads: how far rounding spreads what it reads, as far as known.
      num_microbatches, num_shards: for the class of a difference.
      process: the process that holds the arrays.

    Raises:
      VerifyError: if it calls the host, and two equal runs differ.
    """
    order = range(num_microbatches)
    plain = run_twice(piece, arrays, order) if piece.host_calls else piece(arrays, order)

    def run_moved(seed: int, spreads: Mapping[Any, float]) -> dict[Point, Any]:
        return piece(moved(arrays, piece.rounding, seed, spreads), order)

    # All that a loop shows is of one run: a piece reads the very numbers that the pipeline read. The new state is that
    # of the trainer's own step, another program: as far from this run as rounding leads from the first block on.
    own = {} if piece.is_of_loop else spreads
    others = [run_moved(0, own), run_moved(1, own) if piece.has_order else piece(arrays, order[::-1])]
    far = run_moved(2, spreads)
    if piece.free is not None:  # what one level of rounding does, where a move of one unit changes some
        freely = [piece.free(moved(arrays, piece.rounding, seed, own), order) for seed in range(3, 5)]
        others += [{**plain, **found} for found in freely]
    found = Comparison([], [], _count_choices(plain, actual))
    alone: list[Mapping[Point, Any]] = []  # one microbatch each, for the class of a wrong sum
    for point in piece.compared:
        expected = plain[point]
        unit, apart_by = unit_of(expected), spread(expected, [other[point] for other in others])
        row = row_of(point, expected, actual[point], unit, FACTOR * max(apart_by, unit), process)
        if not row.agrees:
            is_sum = point.kind in ("gradient", "result")
            alone = alone or [piece(arrays, [i]) for i in order if is_sum]
            case = Case(
                expected=wide(expected),
                actual=wide(actual[point]),
                allowed=FACTOR * max(apart_by, unit),
                num_microbatches=num_microbatches,
                num_shards=num_shards,
                parts=np.stack([wide(of[point]) for of in alone]) if is_sum else None,
                stacked=point.kind in ("choice", "forward", "recomputed", "backward"),
                before=wide(before[point]) if point in before else None,
                dtype=str(expected.dtype),
                is_exact=not is_float(expected),
            )
            # A slow clock may show two runs of a piece the same time.
            calls = f"{', '.join(piece.host_calls)} varies from run to run; or " if piece.host_calls else ""
            row = replace(row, likely=calls + classify(case))
        found.rows.append(row)
        found.spreads.append(spread(expected, [other[point] for other in (*others, far)]))
    return found


def run_twice(piece: Piece, arrays: Mapping[Name, Any], order: Sequence[int]) -> dict[Point, Any]:
    """Run a piece; raise a `VerifyError` if a second run differs."""
    found, again = piece(arrays, order), piece(arrays, order)
    for point, array in found.items():
        if apart(array, again[point]).any():
            calls = f" This part of it calls the host: {', '.join(piece.host_calls)}." if piece.host_calls else ""
            raise VerifyError(
                f"two plain steps from the same state, batch and keys differ, first in {point}: the step is not "
                f"deterministic, so nothing can be compared.{calls} Remove clocks, counters and NumPy's random numbers "
                "from it; for random numbers, use the parameter `rngs` of the loss function."
            )
    return found


def _count_choices(plain: Mapping[Point, Any], actual: Mapping[Point, Any]) -> list[Choice]:
    """Return how many choices differ, for each line of the program that makes some."""
    found: list[Choice] = []
    for leaf, line in dict.fromkeys((point.leaf, point.line) for point in plain if point.kind == CHOSEN[0]):
        first, later = ([p for p in plain if (p.kind, p.leaf, p.line) == (kind, leaf, line)] for kind in CHOSEN)
        later.sort(key=lambda point: -point.region)  # regions are recomputed in reverse order of the forward pass
        are_same = [actual[p].shape for p in first] == [actual[p].shape for p in later]
        pairs = zip(first, later, strict=False)
        otherwise = _count((actual[p], actual[q]) for p, q in pairs) if are_same else None
        found.append(
            Choice(
                name=f"{first[0].primitive} at {line}",
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


def row_of(point: Point, expected: Any, actual: Any, unit: float, allowed: float, process: int) -> Row:
    """Return the row of an array; `unit` and `allowed` are in its own numbers."""
    names = {"kind": point.kind, "block": point.block, "leaf": point.name, "process": process}
    difference = apart(expected, actual)
    if not difference.size:
        return Row(**names, index=(), expected=0, actual=0, distance=0, allowed=0)
    where = np.unravel_index(int(np.argmax(difference)), difference.shape)
    return Row(
        **names,
        index=tuple(map(int, where)),
        expected=float(wide(expected)[where].real),
        actual=float(wide(actual)[where].real),
        distance=float(difference[where]) / (unit or 1.0),
        allowed=allowed / (unit or 1.0),
    )
