"""The slowest rank as fast as can be: contiguous blocks cut into stages, stages dealt to ranks, memory kept in bounds.

With one stage on each rank this is the linear partition problem, solved exactly by dynamic programming. With several
(interleaved and V-shaped schedules) a rank's time is the sum of its stages', and the dynamic program carries every
vector of loads that no other one dominates; that is exact as long as they are few, which `Balance.exact` tells. Where
they are too many only the most promising go on, and what a local search over single cuts finds is kept if it is better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpp_flax.layers.memory import MemoryModel

__all__ = ["Balance", "balance", "leanest"]

_INFINITY = float("inf")
_TOLERANCE = 1e-12  # relative: sums of floats in another order are still equal costs
_KEPT_LABELS = 256  # for each number of stages and blocks
_MAX_LABELS = 400_000  # in all: a few seconds
_REACH = 16  # stages between which the local search moves a block

# The value of the blocks start to end (exclusive) as a stage: it grows with every block added at the front.
StageValue = Callable[[int, int, int], float]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """An assignment of blocks to stages.

    Attributes:
      sizes: blocks in each stage.
      slowest: the cost of the slowest rank.
      exact: whether no other assignment within the memory limit has a faster slowest rank.
    """

    sizes: tuple[int, ...]
    slowest: float
    exact: bool


def balance(
    costs: Sequence[float],
    rank_of: Sequence[int],
    memory: MemoryModel | None = None,
    sent: Sequence[float] | None = None,
) -> Balance | None:
    """The contiguous, non-empty stages whose slowest rank is fastest; None if no assignment fits into memory.

    Among equals, with one stage on each rank: that which sends the fewest bytes, then the most even one.

    Args:
      costs: of each block, at least 0.
      rank_of: the rank of each stage.
      memory: what a stage holds, and the limits; None: no limit.
      sent: bytes that cross a cut before each block (the first is not used).

    Example:
      >>> balance([1, 1, 1, 1, 4], [0, 1])
      Balance(sizes=(4, 1), slowest=4.0, exact=True)
      >>> balance([1, 1, 1, 1, 4], [0, 1, 0, 1])  # two stages on each rank: stages 1 and 3 are rank 1's
      Balance(sizes=(2, 1, 1, 1), slowest=5.0, exact=True)

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", section 8.5. Several stages on a rank:
    label setting with dominance, as in multi-objective shortest paths (Martins, 1984).
    """
    if len(set(rank_of)) == len(rank_of):
        return _chain(costs, len(rank_of), memory, sent)
    return _interleaved(costs, rank_of, memory)


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


@dataclass(frozen=True, slots=True)
class _Label:
    """A way to fill the first stages: each rank's load and bytes at its fullest moments, and what came before."""

    loads: tuple[float, ...]
    held: tuple[float, ...]
    end: int
    before: _Label | None


def _interleaved(costs: Sequence[float], rank_of: Sequence[int], memory: MemoryModel | None) -> Balance | None:
    """Several stages on a rank."""
    count, num_stages, num_ranks = len(costs), len(rank_of), 1 + max(rank_of)
    total = _running(costs)
    incumbent = _local_search(costs, rank_of, memory)
    slowest = max(rank_loads(costs, incumbent, rank_of)) if incumbent is not None else _INFINITY
    bound = max(total[-1] / num_ranks, max(costs))
    margin = _TOLERANCE * total[-1]
    best: _Label | None = None
    exact, made = True, 0
    states: dict[int, list[_Label]] = {0: [_Label((0.0,) * num_ranks, memory.nothing if memory else (), 0, None)]}
    for stage, rank in enumerate(rank_of):
        if slowest <= bound + margin or made > _MAX_LABELS:
            break
        later = set(rank_of[stage + 1 :])
        left = num_stages - stage - 1
        grown: dict[int, list[_Label]] = {}
        for start, labels in states.items():
            for label in labels:
                for end in range(start + 1, count - left + 1) if left else [count]:
                    load = label.loads[rank] + total[end] - total[start]
                    if load >= slowest - margin:
                        break
                    held = memory.with_stage(label.held, stage, start, end) if memory else ()
                    if memory and not memory.within_limits(held):
                        break
                    loads = (*label.loads[:rank], load, *label.loads[rank + 1 :])
                    # What is left must find room on the ranks that have stages left.
                    if total[-1] - total[end] > sum(slowest - loads[r] for r in later) + margin:
                        continue
                    grown.setdefault(end, []).append(_Label(loads, held, end, label))
                    made += 1
        states = {}
        for end, labels in grown.items():
            kept = _undominated(labels, sorted(later))
            exact = exact and len(kept) <= _KEPT_LABELS
            states[end] = kept[:_KEPT_LABELS]
        if not left and states.get(count):
            best = min(states[count], key=lambda label: max(label.loads))
            slowest = max(best.loads)
    exact = (exact and made <= _MAX_LABELS) or slowest <= bound + margin
    if best is not None:
        ends = [best.end]
        while best.before is not None:
            best = best.before
            ends.append(best.end)
        incumbent = tuple(b - a for a, b in itertools.pairwise(ends[::-1]))
    if incumbent is None:
        return None
    return Balance(sizes=incumbent, slowest=max(rank_loads(costs, incumbent, rank_of)), exact=exact)


def _undominated(labels: list[_Label], later: Sequence[int]) -> list[_Label]:
    """Labels that no other one is as good as; ranks without later stages count by the slowest of them alone."""
    labels.sort(key=lambda label: (max(label.loads), sum(load * load for load in label.loads), label.held))
    rows = np.array([(*(label.loads[r] for r in later), max(label.loads), *label.held) for label in labels])
    kept: list[int] = []
    for i in range(len(labels)):
        if len(kept) > _KEPT_LABELS:
            break
        if not kept or not (rows[kept] <= rows[i]).all(axis=1).any():
            kept.append(i)
    return [labels[i] for i in kept]


def _local_search(costs: Sequence[float], rank_of: Sequence[int], memory: MemoryModel | None) -> tuple[int, ...] | None:
    """Move blocks from stage to stage as long as that helps, from the even sizes and from the least slowest stage."""
    count, num_stages = len(costs), len(rank_of)
    total = _running(costs)
    share, extra = divmod(count, num_stages)
    starts = [tuple(share + (stage < extra) for stage in range(num_stages))]
    chain = _least_maximum(lambda _, start, end: total[end] - total[start], count, num_stages)
    starts += [chain] if chain is not None else []
    if memory is not None:
        starts.append(leanest(count, num_stages, memory))

    def worth(sizes: Sequence[int]) -> tuple[Any, ...]:
        excess = memory.excess(sizes) if memory is not None else 0.0
        return (max(excess, 0.0), *sorted(rank_loads(costs, sizes, rank_of), reverse=True))

    best: tuple[tuple[Any, ...], tuple[int, ...]] | None = None
    for sizes in starts:
        now = worth(sizes)
        while True:
            near = [(i, j) for i, n in enumerate(sizes) for j in range(i - _REACH, i + _REACH + 1) if n > 1 and j != i]
            moves = [_moved(sizes, i, j) for i, j in near if 0 <= j < num_stages]
            ranked = min(((worth(move), move) for move in moves), default=(now, sizes))
            if ranked[0] >= now:
                break
            now, sizes = ranked
        if best is None or now < best[0]:
            best = (now, sizes)
    return best[1] if best is not None and best[0][0] <= 0.0 else None


def _moved(sizes: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    """One block fewer in a stage and one more in another; those between shift along."""
    return tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))


def _running(costs: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(map(float, costs))]


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))
