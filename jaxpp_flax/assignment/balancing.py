"""The shortest step: contiguous blocks are cut into stages, stages lie on given ranks, memory keeps within limits.

With one stage on each rank the slowest rank sets the pace: the linear partition problem, solved exactly by dynamic
programming. With several (interleaved and V-shaped schedules) ranks also wait for each other where the stages of a rank
are uneven, so that the fastest slowest rank may well make the slower step. There the simulated step decides: over all
assignments where they are few, otherwise over those that a local search reaches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxpp_flax.assignment.memory import MemoryModel
from jaxpp_flax.assignment.memory_search import sizes_within_limits
from jaxpp_flax.assignment.step_time import StepTime

__all__ = ["Balance", "balance", "leanest"]

_INFINITY = float("inf")
_TOLERANCE = 1e-12  # relative: sums of floats in another order are still equal costs
_TRIES = 10_000  # assignments judged by the loads of their ranks: a fraction of a second
_REACH = 16  # stages between which the local search moves a block

# The value of the blocks start to end (exclusive) as a stage: it grows with every block added at the front.
StageValue = Callable[[int, int, int], float]
# How bad an assignment is: bytes over the limits, then its cost. Compared in order.
_Worth = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """An assignment of blocks to stages.

    Attributes:
      sizes: blocks in each stage.
      slowest: the cost of the slowest rank.
      exact: whether no other assignment within the memory limit is better.
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
    """The best contiguous, non-empty stages; None if no assignment that fits into memory is found.

    With one stage on each rank: those whose slowest rank is fastest; among equals those that send the fewest bytes,
    then the most even ones. With several: those with the shortest simulated step; among equals the even ones.

    Args:
      costs: of each block, at least 0.
      rank_of: the rank of each stage.
      memory: what a stage holds, and the limits; None: no limit.
      sent: bytes that cross a cut before each block (the first is not used).
      even: the sizes to beat where ranks have several stages; by default as many blocks in each, give or take one.
      step: tells the time of a step where ranks have several stages; without it their slowest rank is made fastest.

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
    """Sizes of the stages that exceed their limits least (for one stage on each rank: exactly so)."""
    totals = memory.limits
    share = [len(memory.stages_of(rank)) for rank in range(len(totals))]

    def excess(stage: int, start: int, end: int) -> float:
        rank = memory.rank_of[stage]
        return memory.stage_bytes(stage, start, end) - totals[rank] / share[rank]

    found = _least_maximum(excess, count, num_stages)
    return found if found is not None else (1,) * num_stages  # every value is finite: there always is one


def rank_loads(costs: Sequence[float], sizes: Sequence[int], rank_of: Sequence[int]) -> list[float]:
    """The cost of each rank.

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
    """One stage on each rank: first the least maximum, then, of all that reach it, the best by the lesser aims."""
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
    # Tuples of sums, compared in order: as good for dynamic programming as one number is.
    best: list[dict[int, tuple[tuple[float, float], int]]] = [{0: ((0.0, 0.0), 0)}]
    for stage in range(num_stages):
        row: dict[int, tuple[tuple[float, float], int]] = {}
        for end in range(stage + 1, len(costs) + 1):
            for start in range(end - 1, stage - 1, -1):
                value = cost(stage, start, end)
                if value > most:
                    break
                if start in best[stage]:
                    crossed, uneven = best[stage][start][0]
                    aims = (crossed + (crossing[start] if stage else 0.0), uneven + value * value)
                    if end not in row or aims < row[end][0]:
                        row[end] = (aims, start)
        best.append(row)
    ends = [len(costs)]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    sizes = tuple(b - a for a, b in itertools.pairwise(ends[::-1]))
    return Balance(sizes=sizes, slowest=max(rank_loads(costs, sizes, range(num_stages))), exact=True)


def _least_maximum(value: StageValue, count: int, parts: int) -> tuple[int, ...] | None:
    """Sizes of contiguous, non-empty parts whose largest value is least; None where that is infinite."""
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
    """Several stages on a rank: every assignment where they are few, otherwise a local search from several starts."""
    count, num_stages = len(costs), len(rank_of)
    total = _running(costs)

    def excess(sizes: tuple[int, ...]) -> float:
        if memory is None:
            return 0.0
        return sum(max(b - limit, 0.0) for b, limit in zip(memory.rank_bytes(sizes), memory.limits, strict=True))

    def by_load(sizes: tuple[int, ...]) -> _Worth:
        # All loads, not the largest alone: a move that helps the second slowest rank is progress.
        return (excess(sizes), *sorted(rank_loads(costs, sizes, rank_of), reverse=True))

    def by_step(sizes: tuple[int, ...]) -> _Worth:
        return (excess(sizes), step(sizes)) if step is not None else by_load(sizes)

    # Simple ones first: of equals the first is taken.
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
        # The best start first: it gets the most tries.
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
    """Move single blocks from stage to stage, near ones first, as long as that helps; and the tries that are left."""
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
    """One block fewer in a stage and one more in another; those between shift along."""
    return tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))


def _running(costs: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(map(float, costs))]


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))
