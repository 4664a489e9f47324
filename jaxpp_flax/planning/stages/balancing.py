"""Find the assignment with the shortest step: contiguous blocks in each stage.

With one stage on each rank, the slowest rank sets the pace. This is the linear partition problem, which dynamic
programming solves exactly. With several stages on a rank (interleaved and V-shaped schedules), ranks also wait for each
other if the stages of a rank are uneven. Then the assignment with the fastest slowest rank may have a slower step, so
the simulated step decides: over all assignments if they are few, else over the assignments of a local search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxpp_flax.planning.stages.step_time import StepTime

__all__ = ["Sizes", "Worth", "balance", "climb", "rank_loads"]

_INFINITY = float("inf")
_TOLERANCE = 1e-12  # relative: sums of the same floats in another order count as equal
_TRIES = 10_000  # assignments judged by the loads of their ranks: a fraction of a second
_REACH = 16  # stages between which the local search moves a block

Sizes = tuple[int, ...]
"""The number of blocks in each stage."""
Worth = tuple[float, ...]
"""A measure of an assignment, smaller is better. Compared in order."""


def balance(
    costs: Sequence[float],
    rank_of: Sequence[int],
    sent: Sequence[float] | None = None,
    even: Sequence[int] | None = None,
    step: StepTime | None = None,
) -> Sizes:
    """Return the best contiguous, non-empty stages.

    With one stage on each rank, the best assignment has the fastest slowest rank; among equals, the fewest bytes sent,
    then the most even stages. With several stages on a rank, the best one has the shortest simulated step; among
    equals, the even assignment.

    Args:
      costs: the cost of each block, at least 0.
      rank_of: the rank of each stage.
      sent: bytes that cross a cut before each block (the first is not used).
      even: the sizes to beat if ranks have several stages; default: equal numbers of blocks, give or take one.
      step: gives the time of a step if ranks have several stages; without `step`, the slowest rank is made fastest.

    Example:
      >>> balance([1, 1, 1, 1, 4], [0, 1])
      (4, 1)
      >>> balance([1, 1, 1, 1, 4], [0, 1, 0, 1])  # two stages on each rank: stages 1 and 3 are rank 1's
      (2, 1, 1, 1)

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", section 8.5.
    """
    if len(set(rank_of)) == len(rank_of):
        return _chain(costs, len(rank_of), sent)
    return _interleaved(costs, rank_of, even, step)


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


def _chain(costs: Sequence[float], num_stages: int, sent: Sequence[float] | None) -> Sizes:
    """Balance one stage on each rank: first the least maximum, then the best of its equals by the lesser aims."""
    total, least = _running(costs), _least_maximum(costs, num_stages)
    most = max(rank_loads(costs, least, range(num_stages))) + _TOLERANCE * total[-1]
    crossing = list(sent) if sent is not None else [0.0] * len(costs)
    # The best way to fill the first stages with the first blocks, by the number of these blocks.
    best = {0: _Filled(0.0, 0.0, ())}
    for stage in range(num_stages):
        row: dict[int, _Filled] = {}
        for start in sorted(best, reverse=True):
            crossed, uneven, sizes = best[start]
            crossed += crossing[start] if stage else 0.0
            for end in range(start + 1, len(costs) - (num_stages - stage - 1) + 1):
                if total[end] - total[start] > most:
                    break  # longer stages cost no less
                filled = _Filled(crossed, uneven + (total[end] - total[start]) ** 2, (*sizes, end - start))
                if end not in row or filled[:2] < row[end][:2]:
                    row[end] = filled
        best = row
    return best[len(costs)].sizes


class _Filled(NamedTuple):
    """Stages filled with blocks: bytes sent, the sum of squares of the costs (the less, the more even), the sizes."""

    crossed: float
    uneven: float
    sizes: Sizes


def _least_maximum(costs: Sequence[float], parts: int) -> Sizes:
    """Return the sizes of contiguous, non-empty parts with the least maximum cost."""
    count, total = len(costs), _running(costs)
    # best[k][n]: the least maximum of the first n blocks in k parts; start[k][n]: where its last part begins.
    best = [[_INFINITY] * (count + 1) for _ in range(parts + 1)]
    start = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = -_INFINITY
    for k in range(1, parts + 1):
        for n in range(k, count + 1):
            for j in range(n - 1, k - 2, -1):
                last = total[n] - total[j]
                if last >= best[k][n]:
                    break  # longer last parts are no better
                slowest = max(best[k - 1][j], last)
                if slowest < best[k][n]:
                    best[k][n], start[k][n] = slowest, j
    sizes: list[int] = []
    end = count
    for k in range(parts, 0, -1):
        sizes.append(end - start[k][end])
        end = start[k][end]
    return tuple(sizes[::-1])


def _interleaved(
    costs: Sequence[float], rank_of: Sequence[int], even: Sequence[int] | None, step: StepTime | None
) -> Sizes:
    """Balance several stages on a rank: try every assignment if they are few, else search from several starts."""
    count, num_stages = len(costs), len(rank_of)

    def by_load(sizes: Sizes) -> Worth:
        # All loads, not only the largest: a move that helps the second slowest rank is progress.
        return tuple(sorted(rank_loads(costs, sizes, rank_of), reverse=True))

    def by_step(sizes: Sizes) -> Worth:
        return (step(sizes),) if step is not None else by_load(sizes)

    # Simple assignments come first: among equals, the first is taken.
    share, extra = divmod(count, num_stages)
    starts = [tuple(even) if even is not None else tuple(share + (i < extra) for i in range(num_stages))]
    starts.append(_least_maximum(costs, num_stages))
    tries = step.tries if step is not None else _TRIES
    if math.comb(count - 1, num_stages - 1) <= tries:
        return _best([*starts, *_assignments(count, num_stages)], by_step)
    starts += [climb(sizes, by_load, _TRIES)[0] for sizes in starts]
    # The best start comes first, since the first start gets the most tries.
    climbed: list[Sizes] = []
    for sizes in dict.fromkeys((_best(starts, by_step), *starts)):
        found, tries = climb(sizes, by_step, tries)
        climbed.append(found)
    return _best(climbed, by_step)


def _best(candidates: Sequence[Sizes], worth: Callable[[Sizes], Worth]) -> Sizes:
    best, least = candidates[0], worth(candidates[0])
    for sizes in candidates[1:]:
        value = worth(sizes)
        if _less(value, least):
            best, least = sizes, value
    return best


def climb(sizes: Sizes, worth: Callable[[Sizes], Worth], tries: int) -> tuple[Sizes, int]:
    """Move single blocks between stages, near stages first, while this helps; return sizes and remaining tries.

    Example:
      >>> climb((3, 1), lambda sizes: (max(sizes),), tries=10)
      ((2, 2), 7)
    """
    if not tries:
        return sizes, 0
    now = worth(sizes)
    ends = [(i, i + way * reach) for reach in range(1, _REACH) for i in range(len(sizes)) for way in (1, -1)]
    moves = [(i, j) for i, j in ends if 0 <= j < len(sizes)]
    in_vain = 0
    for i, j in itertools.cycle(moves):
        if in_vain == len(moves) or not tries:
            break
        in_vain += 1
        if sizes[i] > 1:
            tries -= 1
            moved = _moved(sizes, i, j)
            value = worth(moved)
            if _less(value, now):
                sizes, now, in_vain = moved, value, 0
    return sizes, tries


def _less(one: Worth, other: Worth) -> bool:
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(abs(a), abs(b)):
            return a < b
    return False


def _assignments(count: int, num_stages: int) -> Iterator[Sizes]:
    for cuts in itertools.combinations(range(1, count), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, count)))


def _moved(sizes: Sizes, source: int, target: int) -> Sizes:
    """Return sizes with one block fewer in a stage and one more in another; the stages between shift."""
    return tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))


def _running(costs: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(map(float, costs))]
