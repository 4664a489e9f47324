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


def balance(costs: Sequence[float], num_stages: int, sent: Sequence[float] | None = None) -> Sizes:
    """Return the stages whose largest cost is the least; among equals, the fewest bytes sent, then the most even ones.

    Args:
      costs: the cost of each block, at least 0.
      num_stages: the number of stages.
      sent: bytes that cross a cut before each block (the first is not used).

    Example:
      >>> balance([1, 1, 1, 1, 4], 2)
      (4, 1)

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", section 8.5.
    """
    total, crossing = [0.0, *itertools.accumulate(map(float, costs))], sent or [0.0] * len(costs)

    def largest(worth: tuple[float, ...], start: int, end: int) -> tuple[float, ...]:
        return (max(worth[0], total[end] - total[start]),)

    def lesser_aims(worth: tuple[float, ...], start: int, end: int) -> tuple[float, ...]:
        return worth[0] + (crossing[start] if start else 0.0), worth[1] + (total[end] - total[start]) ** 2

    even = max(rank_loads(costs, even_sizes(len(costs), num_stages), range(num_stages)))
    (least,), _ = _filled(total, num_stages, largest, even + _TOLERANCE * total[-1])
    return _filled(total, num_stages, lesser_aims, least + _TOLERANCE * total[-1])[1]


def _filled(
    total: Sequence[float],
    num_stages: int,
    added: Callable[[tuple[float, ...], int, int], tuple[float, ...]],
    most: float,
) -> tuple[tuple[float, ...], Sizes]:
    """Return the stages of the least worth in which no stage costs more than `most`, by dynamic programming.

    Args:
      total: the cost of the first blocks, by their number.
      num_stages: the number of stages.
      added: returns the worth of more stages: of a worth, with one more stage from a block to another.
      most: the largest cost of a stage.
    """
    num_blocks = len(total) - 1
    # The best way to fill the first stages with the first blocks, by the number of these blocks.
    best: dict[int, tuple[tuple[float, ...], Sizes]] = {0: ((0.0, 0.0), ())}
    for stage in range(num_stages):
        row: dict[int, tuple[tuple[float, ...], Sizes]] = {}
        for start in sorted(best, reverse=True):
            worth, sizes = best[start]
            for end in range(start + 1, num_blocks - (num_stages - stage - 1) + 1):
                if total[end] - total[start] > most:
                    break  # longer stages cost no less
                filled = added(worth, start, end)
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
            value = worth(moved)
            if value < now * (1 - _TOLERANCE):
                sizes, now, in_vain = moved, value, 0
    return sizes
