"""Making a schedule by simulating one: whenever a rank is free, a rule picks its next pass."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpp_flax.planning.schedule_search.problem import Problem, Words
from jaxpp_flax.schedules.task import TaskKind

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
    step = _Step(problem, rule)
    now = 0.0
    while True:
        for rank in range(problem.num_ranks):
            if not step.busy[rank] and (n := step.choose(rank, now)) is not None:
                step.start(n, now)
        if not step.events:
            break
        now = step.events[0][0]
        while step.events and step.events[0][0] <= now:
            step.take_event()
    return step.words if all(done == problem.num_microbatches for done in step.done) else None


class _Step:
    """A simulated step in which each rank's order is still open."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.rule = rule
        self.passes = passes = problem.passes
        ranks = range(problem.num_ranks)
        urgency = _urgencies(problem, rule)
        by_urgency = sorted(range(len(passes)), key=urgency.__getitem__)
        self.choices = [[n for n in by_urgency if passes[n].rank == rank] for rank in ranks]
        self.users: list[list[tuple[int, float]]] = [[] for _ in passes]
        for n, p in enumerate(passes):
            if p.remote >= 0:
                self.users[p.remote].append((n, p.wait))
        # How much each rank must keep free so that what it has begun can reach its later stages.
        self.after = [
            sum(q.hold for q in passes if q.rank == p.rank and q.kind is _F and q.stage > p.stage) for p in passes
        ]
        self.done = [0] * len(passes)  # passes ended, by pass
        self.begun = [0] * len(passes)
        self.arrived = [problem.num_microbatches if p.remote < 0 else 0 for p in passes]  # inputs at hand, by pass
        self.coming: list[list[float]] = [[] for _ in ranks]  # known arrival times, by rank
        self.held = [0.0] * problem.num_ranks
        self.busy = [False] * problem.num_ranks
        self.words: Words = [[] for _ in ranks]
        self.events: list[tuple[float, bool, int]] = []  # (time, True if an input arrives and no pass ends, pass)

    def choose(self, rank: int, now: float) -> int | None:
        """Return the most urgent pass that ``rank`` can start, or None if it waits."""
        for n in self.choices[rank]:
            p = self.passes[n]
            m = self.begun[n]
            if m >= self.arrived[n] or (p.local >= 0 and self.done[p.local] <= m):
                continue
            if p.kind is _F and self.held[rank] + p.hold + self.after[n] > self.rule.caps[rank] * (1 + 1e-9):
                continue
            return None if p.kind is _W and self._expects(rank, now, self.rule.patience * p.time) else n
        return None

    def _expects(self, rank: int, now: float, within: float) -> bool:
        coming = self.coming[rank]
        while coming and coming[0] <= now:
            heapq.heappop(coming)
        return bool(coming) and coming[0] - now < within

    def start(self, n: int, now: float) -> None:
        p = self.passes[n]
        self.begun[n] += 1
        self.busy[p.rank] = True
        self.held[p.rank] += p.hold
        self.words[p.rank].append(n)
        heapq.heappush(self.events, (now + p.time, False, n))
        for user, wait in self.users[n]:
            heapq.heappush(self.coming[self.passes[user].rank], now + p.time + wait)

    def take_event(self) -> None:
        """Note the next arrival of an input, or the next end of a pass."""
        now, arrives, n = heapq.heappop(self.events)
        if arrives:
            self.arrived[n] += 1
            return
        p = self.passes[n]
        self.busy[p.rank] = False
        self.held[p.rank] -= p.release
        self.done[n] += 1
        for user, wait in self.users[n]:
            heapq.heappush(self.events, (now + wait, True, user))


def _urgencies(problem: Problem, rule: Rule) -> list[tuple[float, float]]:
    keys: list[tuple[float, float]] = []
    for p in problem.passes:
        if p.kind is _W:
            keys.append((math.inf, -p.stage))
        else:
            first = (p.kind is _F) == rule.forward_first
            deep = p.stage if p.kind is _F else -p.stage
            keys.append((0.0 if first else 1.0, -deep if rule.deep_first else deep))
    return keys
