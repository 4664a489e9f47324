"""Contiguous, non-empty stages of blocks: the linear partition problem, solved exactly, and a search from a start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

__all__ = ["Sizes", "balance", "climb", "even_sizes", "rank_loads"]

_TOLERANCE = 1e-12  # relative: sums of the same floats in another order count as equal
_REACH = 16  # stages between which the search moves a block

Sizes = tuple[int, ...]
"""The number of blocks in each stage."""


def even_sizes(num_blocks: int, num_stages: int) -> Sizes:
    """Return equal numbers of blocks, or one more in each of the first stages.

    Example:
      >>> even_sizes(8, 3)
      (3, 3, 2)
    """
    share, extra = divmod(num_blocks, num_stages)
    return tuple(share + (stage < extra) for stage in range(num_stages))


def balance(
    costs: Sequence[float],
    num_stages: int,
    sent: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> Sizes:
    """Return the stages whose largest cost is the least; among equals, the fewest bytes sent, then the most even ones.

    Args:
      costs: the cost of each block, at least 0.
      num_stages: the number of stages.
      sent: bytes that cross a cut before each block (the first is not used).
      weights: factors of the cost of each stage; default: 1.

    Example:
      >>> balance([1, 1, 1, 1, 4], 2)
      (4, 1)
      >>> balance([1, 1, 1, 1], 2, weights=[3.0, 1.0])  # a block costs three times as much in the first stage
      (1, 3)

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", section 8.5.
    """
    running = [0.0, *itertools.accumulate(map(float, costs))]
    factors, crossing = weights or [1.0] * num_stages, sent or [0.0] * len(costs)

    def cost(stage: int, start: int, end: int) -> float:
        return factors[stage] * (running[end] - running[start])

    even = even_sizes(len(costs), num_stages)
    bounds = zip(range(num_stages), itertools.accumulate((0, *even)), itertools.accumulate(even), strict=False)
    most = max(cost(*stage) for stage in bounds)
    (least,), _ = _filled(len(costs), num_stages, lambda worth, *stage: (max(*worth, cost(*stage)),), cost, most)

    def lesser_aims(worth: tuple[float, ...], stage: int, start: int, end: int) -> tuple[float, ...]:
        return worth[0] + (crossing[start] if stage else 0.0), worth[1] + cost(stage, start, end) ** 2

    return _filled(len(costs), num_stages, lesser_aims, cost, least + _TOLERANCE * running[-1] * max(factors))[1]


def _filled(
    num_blocks: int,
    num_stages: int,
    added: Callable[[tuple[float, ...], int, int, int], tuple[float, ...]],
    cost: Callable[[int, int, int], float],
    most: float,
) -> tuple[tuple[float, ...], Sizes]:
    """Return the stages of the least worth in which no stage costs more than `most`, by dynamic programming."""
    # The best way to fill the first stages with the first blocks, by the number of these blocks.
    best: dict[int, tuple[tuple[float, ...], Sizes]] = {0: ((0.0, 0.0), ())}
    for stage in range(num_stages):
        row: dict[int, tuple[tuple[float, ...], Sizes]] = {}
        for start in sorted(best, reverse=True):
            worth, sizes = best[start]
            for end in range(start + 1, num_blocks - (num_stages - stage - 1) + 1):
                if cost(stage, start, end) > most:
                    break  # longer stages cost no less
                filled = added(worth, stage, start, end)
                if end not in row or filled < row[end][0]:
                    row[end] = filled, (*sizes, end - start)
        best = row
    return best[num_blocks]


def rank_loads(costs: Sequence[float], sizes: Sequence[int], rank_of: Sequence[int]) -> list[float]:
    """Return the cost of each rank.

    Example:
      >>> rank_loads([1, 2, 3, 4], [1, 1, 1, 1], [0, 1, 0, 1])
      [4.0, 6.0]
    """
    loads = [0.0] * (1 + max(rank_of))
    start = 0
    for size, rank in zip(sizes, rank_of, strict=True):
        loads[rank] += float(sum(costs[start : start + size]))
        start += size
    return loads


def climb(sizes: Sizes, worth: Callable[[Sizes], float], tries: int) -> Sizes:
    """Move single blocks between stages, near stages first, while this makes less of `worth`, in so many tries.

    Example:
      >>> climb((3, 1), max, tries=10)
      (2, 2)
    """
    now, in_vain = worth(sizes), 0
    ends = [(i, i + way * reach) for reach in range(1, _REACH) for i in range(len(sizes)) for way in (1, -1)]
    moves = [(i, j) for i, j in ends if 0 <= j < len(sizes)]
    for i, j in itertools.cycle(moves):
        if in_vain == len(moves) or tries <= 0:
            break
        in_vain += 1
        if sizes[i] > 1:
            tries -= 1
            moved = tuple(size - (k == i) + (k == j) for k, size in enumerate(sizes))
            if (value := worth(moved)) < now * (1 - _TOLERANCE):
                sizes, now, in_vain = moved, value, 0
    return sizes
