"""The shapes of microbatches of several lengths: how many rows of each length make a microbatch of one budget."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxpp_flax.counts import check_count

__all__ = ["RowCounts"]


@dataclass(frozen=True)
class RowCounts:
    """The declared lengths in increasing order, and the rows of a microbatch of each length.

    Example:
      >>> RowCounts.of((512, 1024, 2048), tokens=8192).rows
      (16, 8, 4)
      >>> RowCounts.of((512, 1024, 2048), tokens=8192, cost=lambda n: n * (1 + n / 2048)).rows  # attention's square
      (16, 6, 2)
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        tokens: int,
        cost: Callable[[int], float] | None = None,
        divisible_by: int = 1,
    ) -> RowCounts:
        """Return the rows that a budget allows; for the arguments, see `group_by_length`."""
        tokens = check_count("tokens", tokens)
        each = check_count("divisible_by", divisible_by)
        checked = tuple(sorted({check_count("lengths", length) for length in lengths}))
        if not checked:
            raise ValueError("lengths is empty: declare at least one length, such as lengths=(512, 1024, 2048).")
        most = [tokens // length // each * each for length in checked]
        if not most[-1]:
            raise ValueError(
                f"tokens={tokens}: a microbatch of {each} row{'s' * (each > 1)} of length {checked[-1]} has "
                f"{each * checked[-1]} tokens. Give tokens={each * checked[-1]} or more, or shorter lengths."
            )
        costs = [_checked_cost(cost, length) for length in checked]
        # The most that every length can cost without more than `tokens`; the factor forgives a rounding error.
        budget = min(rows * of_row for rows, of_row in zip(most, costs, strict=True)) * (1 + 1e-9)
        fitting = [
            max(each, min(rows, int(budget / of_row) // each * each)) for rows, of_row in zip(most, costs, strict=True)
        ]
        return cls(checked, tuple(fitting))

    def index_for(self, length: int) -> int | None:
        """Return the place of the shortest declared length that holds so many tokens; None if none does."""
        index = bisect_left(self.lengths, length)
        return index if index < len(self.lengths) else None


def _checked_cost(cost: Callable[[int], float] | None, length: int) -> float:
    if cost is None:
        return float(length)
    value = float(cost(length))
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"cost({length}) returned {value!r}: the cost of a row is a finite number above 0.")
    return value
