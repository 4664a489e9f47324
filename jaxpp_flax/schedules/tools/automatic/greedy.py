"""Making a schedule by simulating one: whenever a rank is free, a rule picks its next pass."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpp_flax.schedules.task import TaskKind
from jaxpp_flax.schedules.tools.automatic.problem import Problem, Words

_F, _W = TaskKind.FORWARD, TaskKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which a free rank chooses its next pass.

    Attributes:
        caps: for each rank, the activation memory beyond which it starts no forward.
        forward_first: True if a forward goes before an input gradient, when both are ready.
        deep_first: True if the later of two stages on a rank goes first.
        patience: a rank rather idles than start a weight gradient, if more urgent work is known to
            arrive within this part of the time the weight gradient takes.
    """

    caps: tuple[float, ...]
    forward_first: bool
    deep_first: bool
    patience: float


def rules(problem: Problem) -> Iterator[Rule]:
    """Return a grid of rules, from little memory to much memory."""
    ranks, count = problem.num_ranks, problem.num_microbatches
    hold = [sum(p.hold for p in problem.passes if p.rank == rank) for rank in range(ranks)]
    slopes: list[list[float]] = [[ranks - r for r in range(ranks)], [2 * (ranks - r) - 1 for r in range(ranks)]]
    slopes.append([1.5 * (ranks - r) for r in range(ranks)])
    levels = {1.0, 2.0, ranks / 2 + 1, ranks, 1.25 * ranks, 1.5 * ranks, 2 * ranks - 1, 2 * ranks + 1, 3 * ranks, count}
    slopes += [[level] * ranks for level in sorted(levels)]
    seen: set[tuple[float, ...]] = set()
    one_each = problem.num_stages == ranks
    for slope in slopes:
        room = [min(slope[r], count) * hold[r] for r in range(ranks)]
        caps = tuple(min(max(a, h), limit) for a, h, limit in zip(room, hold, problem.limits, strict=True))
        if caps in seen:
            continue
        seen.add(caps)
        for patience in (0.0, 0.5, 1.0) if problem.splits else (0.0,):
            for forward_first in (False, True):
                for deep_first in (True,) if one_each else (True, False):
                    yield Rule(caps, forward_first, deep_first, patience)


def construct(problem: Problem, rule: Rule) -> Words | None:
    """Return the words that ``rule`` makes, or None if its caps block a rank."""
    passes, count = problem.passes, problem.num_microbatches
    ranks = range(problem.num_ranks)
    mine = [[n for n, p in enumerate(passes) if p.rank == rank] for rank in ranks]
    users: list[list[tuple[int, float]]] = [[] for _ in passes]
    for n, p in enumerate(passes):
        if p.remote >= 0:
            users[p.remote].append((n, p.wait))
    # How much each rank must keep free so that what it has begun can reach its later stages.
    after = [sum(q.hold for q in passes if q.rank == p.rank and q.kind is _F and q.stage > p.stage) for p in passes]
    priority = _priorities(problem, rule)
    done = [0] * len(passes)  # passes ended, by pass
    begun = [0] * len(passes)
    arrived = [count if p.remote < 0 else 0 for p in passes]  # inputs at hand, by pass
    coming: list[list[float]] = [[] for _ in ranks]  # known arrival times, by rank
    held = [0.0] * problem.num_ranks
    busy = [False] * problem.num_ranks
    words: Words = [[] for _ in ranks]
    events: list[tuple[float, int, int, int]] = []  # (time, 0 ends / 1 arrives, pass, rank)
    left = count * len(passes)
    now = 0.0
    while True:
        for rank in ranks:
            if busy[rank]:
                continue
            pick = -1
            for n in mine[rank]:
                p = passes[n]
                m = begun[n]
                if m >= count or m >= arrived[n] or (p.local >= 0 and done[p.local] <= m):
                    continue
                if p.kind is _F and held[rank] + p.hold + after[n] > rule.caps[rank] * (1 + 1e-9):
                    continue
                if pick < 0 or priority[n] < priority[pick]:
                    pick = n
            if pick < 0:
                continue
            p = passes[pick]
            if p.kind is _W and rule.patience and coming[rank]:
                while coming[rank] and coming[rank][0] <= now:
                    heapq.heappop(coming[rank])
                if coming[rank] and coming[rank][0] - now < rule.patience * p.time:
                    continue
            begun[pick] += 1
            busy[rank] = True
            held[rank] += p.hold
            words[rank].append(pick)
            heapq.heappush(events, (now + p.time, 0, pick, rank))
            for user, wait in users[pick]:
                heapq.heappush(coming[passes[user].rank], now + p.time + wait)
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] <= now:
            _, what, n, rank = heapq.heappop(events)
            if what:
                arrived[n] += 1
                continue
            busy[rank] = False
            held[rank] -= passes[n].release
            done[n] += 1
            left -= 1
            for user, wait in users[n]:
                heapq.heappush(events, (now + wait, 1, user, passes[user].rank))
    return None if left else words


def _priorities(problem: Problem, rule: Rule) -> list[tuple[float, float]]:
    keys: list[tuple[float, float]] = []
    for p in problem.passes:
        if p.kind is _W:
            keys.append((math.inf, -p.stage))
        else:
            first = (p.kind is _F) == rule.forward_first
            deep = p.stage if p.kind is _F else -p.stage
            keys.append((0.0 if first else 1.0, -deep if rule.deep_first else deep))
    return keys
