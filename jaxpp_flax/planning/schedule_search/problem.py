"""The search space: for each rank, one word over the passes of its stages.

All microbatches of a step are equal. So a stage's passes of one kind may be relabelled: the
``k``-th pass becomes microbatch ``k``. This keeps every dependency (the ``k``-th forward of a stage
still follows ``k`` forwards of the stage before) and every count in memory. So it is enough to
search over the order of passes on each rank; the microbatches follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.memory import Memory
from jaxpp_flax.schedules.schedule import check_count
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable, Transfer
from jaxpp_flax.schedules.task import AnyTask, Task, TaskKind, flatten, needs, results

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT

Words = list[list[int]]
"""The numbers of each rank's passes, in order."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of work of one stage, which runs once for each microbatch.

    Attributes:
        time: the time of the pass.
        hold: the activation memory that the pass adds at its start.
        release: the activation memory that the pass frees at its end.
        remote: the pass of another stage whose result this pass needs, or -1; ``wait`` is the
            transfer time of that result.
        local: the pass of the same stage that must come before, or -1.
    """

    kind: TaskKind
    stage: int
    rank: int
    time: float
    hold: float
    release: float
    remote: int
    wait: float
    local: int


@dataclass(frozen=True)
class Problem:
    """Costs, links and limits, in a form for fast evaluation of words."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    splits: bool
    placement: tuple[int, ...]
    table: CostTable
    transfer: Transfer
    limits: tuple[float, ...]
    passes: tuple[Pass, ...]

    @classmethod
    def make(
        cls,
        placement: Sequence[int],
        num_microbatches: int,
        *,
        splits: bool,
        costs: Costs,
        transfer: Transfer,
        limits: Sequence[float],
    ) -> Problem:
        num_stages = len(placement)
        table = costs.table(num_stages)
        first = [  # each pass, for the first microbatch
            Task(kind, stage, 0)
            for stage in range(num_stages)
            for kind in ((_F, _I, _W) if splits and stage else (_F, _B))
        ]
        maker = {result: n for n, task in enumerate(first) for result in results(task)}
        passes: list[Pass] = []
        for task in first:
            rank = placement[task.stage]
            remote, wait, local = -1, 0.0, -1
            for need in needs(task, num_stages):
                if need.stage == task.stage:
                    local = maker[need]
                    continue
                remote, source = maker[need], placement[need.stage]
                wait = 0.0 if source == rank else transfer.time(source, rank, table.sent_bytes(need))
            added, removed = table.stages[task.stage].changes(task)
            time = table.duration(task)
            passes.append(Pass(task.kind, task.stage, rank, time, added, -removed, remote, wait, local))
        return cls(
            1 + max(placement),
            num_stages,
            num_microbatches,
            splits,
            tuple(placement),
            table,
            transfer,
            tuple(limits),
            tuple(passes),
        )

    def words(self, lists: Sequence[Sequence[AnyTask]]) -> Words:
        """Convert a schedule to words; a whole backward is split if this problem splits backwards."""
        number = {(p.kind, p.stage): n for n, p in enumerate(self.passes)}
        words: Words = []
        for tasks in lists:
            word: list[int] = []
            for task in flatten(tasks):
                n = number.get((task.kind, task.stage))
                if n is not None:
                    word.append(n)
                else:
                    word += [number[_I, task.stage], number[_W, task.stage]]
            words.append(word)
        return words

    def tasks(self, words: Words) -> list[list[Task]]:
        """Convert ``words`` to tasks."""
        lists: list[list[Task]] = []
        for word in words:
            count = [0] * len(self.passes)
            tasks: list[Task] = []
            for n in word:
                p = self.passes[n]
                tasks.append(Task(p.kind, p.stage, count[n]))
                count[n] += 1
            lists.append(tasks)
        return lists

    def peak(self, rank: int, word: Sequence[int]) -> float:
        """Return the maximum activation memory of ``rank``."""
        memory = Memory()
        for n in word:
            memory.change(self.passes[n].hold)
            memory.change(-self.passes[n].release)
        return memory.peak

    def fits(self, rank: int, word: Sequence[int]) -> bool:
        # These are sums of floats: a value at the limit must count as within the limit.
        return self.peak(rank, word) <= self.limits[rank] * (1 + 1e-9)


def evaluate(problem: Problem, words: Words) -> tuple[float, list[list[float]]] | None:
    """Return the makespan and, for each pass, its end times by microbatch; None if the ranks deadlock."""
    ends: list[list[float]] = [[] for _ in problem.passes]
    at = [0] * len(words)
    free = [0.0] * len(words)
    moved = True
    while moved:
        moved = False
        for rank, word in enumerate(words):
            position, free[rank] = _run(problem.passes, word, at[rank], free[rank], ends)
            if position != at[rank]:
                at[rank] = position
                moved = True
    if any(position < len(word) for position, word in zip(at, words, strict=True)):
        return None
    return max(free), ends


def _run(
    passes: Sequence[Pass], word: Sequence[int], position: int, now: float, ends: list[list[float]]
) -> tuple[int, float]:
    """Run a rank's word from ``position`` as far as possible; return the new position and the time."""
    for n in word[position:]:
        p = passes[n]
        mine = ends[n]
        m = len(mine)
        if p.local >= 0 and len(ends[p.local]) <= m:
            break
        if p.remote >= 0:
            there = ends[p.remote]
            if len(there) <= m:
                break
            now = max(now, there[m] + p.wait)
        now += p.time
        mine.append(now)
        position += 1
    return position, now


def lower_bound(problem: Problem) -> float:
    """Return a makespan that no order can beat.

    For each rank, every pass has a head (its earliest start) and a tail (the time of the work that
    must follow it, on this rank or another). The bound is the time of a single machine that may
    interrupt its work and ignores other ranks. Jackson's rule (preemptive) solves this relaxation
    exactly: always run the available pass with the longest tail.
    """
    passes = problem.passes
    heads = [0.0] * len(passes)
    order = in_dependency_order(passes)
    for n in order:
        p = passes[n]
        for need, wait in ((p.local, 0.0), (p.remote, p.wait)):
            if need >= 0:
                heads[n] = max(heads[n], heads[need] + passes[need].time + wait)
    tails = [0.0] * len(passes)
    for n in reversed(order):
        p = passes[n]
        for need, wait in ((p.local, 0.0), (p.remote, p.wait)):
            if need >= 0:
                tails[need] = max(tails[need], tails[n] + p.time + wait)
    bound = max(h + p.time + t for h, p, t in zip(heads, passes, tails, strict=True))
    count = problem.num_microbatches
    for rank in range(problem.num_ranks):
        mine = [n for n, p in enumerate(passes) if p.rank == rank]
        bound = max(bound, _one_machine([(heads[n], passes[n].time * count, tails[n]) for n in mine]))
    return bound


def in_dependency_order(passes: Sequence[Pass]) -> list[int]:
    """Sort passes so that each follows its needs: forwards from the first stage on, then backwards from the last."""

    def key(n: int) -> tuple[bool, int]:
        p = passes[n]
        return (False, p.stage) if p.kind is _F else (True, -p.stage)

    return sorted(range(len(passes)), key=key)


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Return the preemptive one-machine bound for ``(head, time, tail)`` jobs."""
    waiting = sorted(jobs)
    ready: list[list[float]] = []  # [tail, time left]
    now = bound = 0.0
    position = 0
    while position < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[position][0])
        while position < len(waiting) and waiting[position][0] <= now:
            ready.append([waiting[position][2], waiting[position][1]])
            position += 1
        ready.sort()
        job = ready[-1]
        until = waiting[position][0] if position < len(waiting) else math.inf
        step = min(job[1], until - now)
        now += step
        job[1] -= step
        if job[1] <= 0:
            bound = max(bound, now + job[0])
            ready.pop()
    return bound


def check_limits(problem: Problem) -> None:
    """Refuse limits that are too small for even one microbatch at a time."""
    for rank, limit in enumerate(problem.limits):
        need = sum(p.hold for p in problem.passes if p.rank == rank)
        if need > limit * (1 + 1e-9):
            raise ScheduleError(
                f"memory_limit of rank {rank} is {limit:g}, but one microbatch alone holds {need:g} there. "
                f"Raise it to {need:g} or more, or make microbatches smaller"
            )


def check_counts(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    check_count("num_ranks", num_ranks)
    check_count("num_microbatches", num_microbatches)
    check_count("stages_per_rank", stages_per_rank)
