"""Find the assignment with the shortest step: contiguous blocks in each stage, given ranks, memory within limits.

With one stage on each rank, the slowest rank sets the pace. This is the linear partition problem, which dynamic
programming solves exactly. With several stages on a rank (interleaved and V-shaped schedules), ranks also wait for each
other if the stages of a rank are uneven. Then the assignment with the fastest slowest rank may have a slower step, so
the simulated step decides: over all assignments if they are few, else over the assignments of a local search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpp_flax.assignment.memory import MemoryModel
from jaxpp_flax.assignment.memory_search import sizes_within_limits
from jaxpp_flax.assignment.simulated_step import StepTime

__all__ = ["Balance", "balance", "leanest"]

_INFINITY = float("inf")
_TOLERANCE = 1e-12  # relative: sums of the same floats in another order count as equal
_TRIES = 10_000  # assignments judged by the loads of their ranks: a fraction of a second
_REACH = 16  # stages between which the local search moves a block

# The value of a stage with blocks start to end (exclusive). The value grows with every block added at the front.
StageValue = Callable[[int, int, int], float]
# A measure of an assignment, smaller is better: bytes over the limits, then the cost. Compared in order.
_Worth = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """An assignment of blocks to stages.

    Attributes:
      sizes: blocks in each stage.
      slowest: the cost of the slowest rank.
      exact: True if no other assignment within the memory limit is better.
    """

    sizes: tuple[int, ...]
    slowest: float
    exact: bool


def balance(
    costs: Sequence[float],
    rank_of: Sequence[int],
    memory: MemoryModel | None = None,
    sent: Sequence[float] | None = None,
    even: Sequence[int] | None = None,
    step: StepTime | None = None,
) -> Balance | None:
    """Return the best contiguous, non-empty stages; None if no assignment within the memory limits is found.

    With one stage on each rank, the best assignment has the fastest slowest rank; among equals, the fewest bytes sent,
    then the most even stages. With several stages on a rank, the best one has the shortest simulated step; among
    equals, the even assignment.

    Args:
      costs: the cost of each block, at least 0.
      rank_of: the rank of each stage.
      memory: the memory of stages, and the limits; None: no limit.
      sent: bytes that cross a cut before each block (the first is not used).
      even: the sizes to beat if ranks have several stages; default: equal numbers of blocks, give or take one.
      step: gives the time of a step if ranks have several stages; without `step`, the slowest rank is made fastest.

    Example:
      >>> balance([1, 1, 1, 1, 4], [0, 1])
      Balance(sizes=(4, 1), slowest=4.0, exact=True)
      >>> balance([1, 1, 1, 1, 4], [0, 1, 0, 1])  # two stages on each rank: stages 1 and 3 are rank 1's
      Balance(sizes=(2, 1, 1, 1), slowest=5.0, exact=True)

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", section 8.5.
    """
    if len(set(rank_of)) == len(rank_of):
        return _chain(costs, len(rank_of), memory, sent)
    return _interleaved(costs, rank_of, memory, even, step)


def leanest(count: int, num_stages: int, memory: MemoryModel) -> tuple[int, ...]:
    """Return the sizes of stages that exceed their limits least (exact only for one stage on each rank)."""
    totals = memory.limits
    share = [len(memory.stages_of(rank)) for rank in range(len(totals))]

    def excess(stage: int, start: int, end: int) -> float:
        rank = memory.rank_of[stage]
        return memory.stage_bytes(stage, start, end) - totals[rank] / share[rank]

    found = _least_maximum(excess, count, num_stages)
    return found if found is not None else (1,) * num_stages  # every value is finite, so a result always exists


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


def _chain(
    costs: Sequence[float], num_stages: int, memory: MemoryModel | None, sent: Sequence[float] | None
) -> Balance | None:
    """Balance one stage on each rank: first the least maximum, then the best of its equals by the lesser aims."""
    total = _running(costs)

    def fits(stage: int, start: int, end: int) -> bool:
        return memory is None or memory.stage_bytes(stage, start, end) <= memory.limits[memory.rank_of[stage]]

    def cost(stage: int, start: int, end: int) -> float:
        return total[end] - total[start] if fits(stage, start, end) else _INFINITY

    found = _least_maximum(cost, len(costs), num_stages)
    if found is None:
        return None
    slowest = max(cost(s, a, b) for s, (a, b) in enumerate(_ranges(found)))
    most = slowest + _TOLERANCE * total[-1]
    crossing = list(sent) if sent is not None else [0.0] * len(costs)
    # The best way to fill the first stages with the first blocks, by the number of these blocks.
    best = {0: _Filled(0.0, 0.0, ())}
    for stage in range(num_stages):
        row: dict[int, _Filled] = {}
        for start in sorted(best, reverse=True):
            crossed, uneven, sizes = best[start]
            crossed += crossing[start] if stage else 0.0
            for end in range(start + 1, len(costs) - (num_stages - stage - 1) + 1):
                if cost(stage, start, end) > most:
                    break  # longer stages cost no less
                filled = _Filled(crossed, uneven + (total[end] - total[start]) ** 2, (*sizes, end - start))
                if end not in row or filled[:2] < row[end][:2]:
                    row[end] = filled
        best = row
    sizes = best[len(costs)].sizes
    return Balance(sizes=sizes, slowest=max(rank_loads(costs, sizes, range(num_stages))), exact=True)


class _Filled(NamedTuple):
    """Stages filled with blocks: bytes sent, the sum of squares of the costs (the less, the more even), the sizes."""

    crossed: float
    uneven: float
    sizes: tuple[int, ...]


def _least_maximum(value: StageValue, count: int, parts: int) -> tuple[int, ...] | None:
    """Return the sizes of contiguous, non-empty parts with the least maximum value; None if it is infinite."""
    # best[k][n]: the least maximum of the first n blocks in k parts; start[k][n]: where its last part begins.
    best = [[_INFINITY] * (count + 1) for _ in range(parts + 1)]
    start = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = -_INFINITY
    for k in range(1, parts + 1):
        for n in range(k, count + 1):
            for j in range(n - 1, k - 2, -1):
                last = value(k - 1, j, n)
                if last >= best[k][n]:
                    break  # longer last parts are no better
                slowest = max(best[k - 1][j], last)
                if slowest < best[k][n]:
                    best[k][n], start[k][n] = slowest, j
    if best[parts][count] == _INFINITY:
        return None
    sizes: list[int] = []
    end = count
    for k in range(parts, 0, -1):
        sizes.append(end - start[k][end])
        end = start[k][end]
    return tuple(sizes[::-1])


def _interleaved(
    costs: Sequence[float],
    rank_of: Sequence[int],
    memory: MemoryModel | None,
    even: Sequence[int] | None,
    step: StepTime | None,
) -> Balance | None:
    """Balance several stages on a rank: try every assignment if they are few, else search from several starts."""
    count, num_stages = len(costs), len(rank_of)
    total = _running(costs)

    def excess(sizes: tuple[int, ...]) -> float:
        if memory is None:
            return 0.0
        return sum(max(b - limit, 0.0) for b, limit in zip(memory.rank_bytes(sizes), memory.limits, strict=True))

    def by_load(sizes: tuple[int, ...]) -> _Worth:
        # All loads, not only the largest: a move that helps the second slowest rank is progress.
        return (excess(sizes), *sorted(rank_loads(costs, sizes, rank_of), reverse=True))

    def by_step(sizes: tuple[int, ...]) -> _Worth:
        return (excess(sizes), step(sizes)) if step is not None else by_load(sizes)

    # Simple assignments come first: among equals, the first is taken.
    share, extra = divmod(count, num_stages)
    starts = [tuple(even) if even is not None else tuple(share + (i < extra) for i in range(num_stages))]
    chain = _least_maximum(lambda _, start, end: total[end] - total[start], count, num_stages)
    starts += [chain] if chain is not None else []
    tries = step.tries if step is not None else _TRIES
    exact = math.comb(count - 1, num_stages - 1) <= tries
    if exact:
        starts += _assignments(count, num_stages)
    else:
        starts += [leanest(count, num_stages, memory)] if memory is not None else []
        starts += [_climb(sizes, by_load, _TRIES)[0] for sizes in starts]
    best = _best(starts, by_step)
    if not exact:
        # The best start comes first, since the first start gets the most tries.
        climbed: list[tuple[int, ...]] = []
        for sizes in dict.fromkeys((best, *starts)):
            found, tries = _climb(sizes, by_step, tries)
            climbed.append(found)
        best = _best(climbed, by_step)
    if memory is not None and not exact and excess(best) > 0 and (lean := sizes_within_limits(memory)) is not None:
        best, _ = _climb(lean, by_step, _TRIES if step is None else step.tries)
    if excess(best) > 0:
        return None
    return Balance(sizes=best, slowest=max(rank_loads(costs, best, rank_of)), exact=exact)


def _best(candidates: Sequence[tuple[int, ...]], worth: Callable[[tuple[int, ...]], _Worth]) -> tuple[int, ...]:
    best, least = candidates[0], worth(candidates[0])
    for sizes in candidates[1:]:
        value = worth(sizes)
        if _less(value, least):
            best, least = sizes, value
    return best


def _climb(
    sizes: tuple[int, ...], worth: Callable[[tuple[int, ...]], _Worth], tries: int
) -> tuple[tuple[int, ...], int]:
    """Move single blocks between stages, near stages first, while this helps; return sizes and remaining tries."""
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


def _less(one: _Worth, other: _Worth) -> bool:
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(abs(a), abs(b)):
            return a < b
    return False


def _assignments(count: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, count), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, count)))


def _moved(sizes: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    """Return sizes with one block fewer in a stage and one more in another; the stages between shift."""
    return tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))


def _running(costs: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(map(float, costs))]


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))
