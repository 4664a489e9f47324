"""The optimum of a small case, proved: the yardstick of `jaxpp_flax.planning.search`.

A mixed-integer program with one start time for each task and one 0/1 variable for each pair of
passes on a rank whose order is open, solved with HiGHS through SciPy. It grows fast: 3 ranks and
4 microbatches take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from jaxpp_flax.planning.schedule_search.problem import Problem, Words, evaluate

_INFEASIBLE = 2  # of scipy.optimize.milp's status codes


@dataclass(frozen=True)
class Exact:
    """What the solver found: a makespan, its words, and how low any makespan can be.

    Where it proved that nothing is as fast as the schedule known before, there are no words.
    """

    makespan: float
    words: Words
    bound: float

    @property
    def proved(self) -> bool:
        """Whether no better schedule exists, to one part in a million."""
        return self.makespan <= self.bound * (1 + 1e-6) + 1e-9


def prove(problems: Sequence[Problem], known: float, time_limit: float = 60.0) -> float | None:
    """The least makespan of all `problems`, or None if the time ran out before it was proved.

    Args:
        problems: the same case in its forms: stages dealt out in turn or in a V, backward whole or split.
        known: the makespan of a schedule of one of them.
        time_limit: seconds, for all problems together.
    """
    best, bound = known, float("inf")
    for problem in problems:
        exact = solve(problem, best, time_limit / len(problems))
        if exact is None:
            return None
        bound = min(bound, exact.bound)
        found = evaluate(problem, exact.words) if exact.words else None
        if found and all(problem.fits(rank, word) for rank, word in enumerate(exact.words)):
            best = min(best, found[0])
    return best if best <= bound * (1 + 1e-6) + 1e-9 else None


def solve(problem: Problem, upper: float, time_limit: float = 60.0) -> Exact | None:
    """The best words for ``problem``, or None if the time ran out before any were found.

    Args:
        problem: what is being scheduled.
        upper: the makespan of a known schedule. It need not be met again: anything up to it counts.
        time_limit: seconds.
    """
    passes, count = problem.passes, problem.num_microbatches
    num_starts = len(passes) * count
    pairs: dict[tuple[int, int, int, int], int] = {}
    for a in range(len(passes)):
        for b in range(a + 1, len(passes)):
            if passes[a].rank == passes[b].rank:
                for i in range(count):
                    for j in range(count):
                        pairs[a, i, b, j] = num_starts + 1 + len(pairs)
    total = num_starts + 1 + len(pairs)
    makespan = num_starts
    rows: list[dict[int, float]] = []
    lows: list[float] = []

    def at_least(terms: dict[int, float], low: float) -> None:
        rows.append(terms)
        lows.append(low)

    def start(n: int, m: int) -> int:
        return n * count + m

    lower, highest = np.zeros(total), np.full(total, upper)
    highest[num_starts + 1 :] = 1.0
    for n, p in enumerate(passes):
        for m in range(count):
            at_least({makespan: 1.0, start(n, m): -1.0}, p.time)
            if m:  # microbatches are alike, so they may be taken in order
                at_least({start(n, m): 1.0, start(n, m - 1): -1.0}, p.time)
            for need, wait in ((p.local, 0.0), (p.remote, p.wait)):
                if need >= 0:
                    at_least({start(n, m): 1.0, start(need, m): -1.0}, passes[need].time + wait)
    for (a, i, b, j), x in pairs.items():  # x = 1: a's i-th before b's j-th
        ta, tb = passes[a].time, passes[b].time
        at_least({start(b, j): 1.0, start(a, i): -1.0, x: -(upper + ta)}, ta - (upper + ta))
        at_least({start(a, i): 1.0, start(b, j): -1.0, x: upper + tb}, tb)
        if j + 1 < count:
            at_least({pairs[a, i, b, j + 1]: 1.0, x: -1.0}, 0.0)
        if i + 1 < count:
            at_least({x: 1.0, pairs[a, i + 1, b, j]: -1.0}, 0.0)
        for later, earlier, value in ((passes[b], a, 1.0), (passes[a], b, 0.0)):
            if later.local == earlier and i == j:
                lower[x] = highest[x] = value
    _limit_memory(problem, pairs, at_least)
    entries = [(r, column, value) for r, terms in enumerate(rows) for column, value in terms.items()]
    matrix = csr_array(
        (
            np.array([value for _, _, value in entries]),
            (np.array([r for r, _, _ in entries]), np.array([c for _, c, _ in entries])),
        ),
        shape=(len(rows), total),
    )
    objective = np.zeros(total)
    objective[makespan] = 1.0
    integrality = np.zeros(total)
    integrality[num_starts + 1 :] = 1
    answer = milp(
        objective,
        integrality=integrality,
        bounds=Bounds(lower, highest),  # type: ignore[arg-type]
        constraints=LinearConstraint(matrix, np.array(lows), np.full(len(lows), np.inf)),  # type: ignore[arg-type]
        options={"time_limit": time_limit},
    )
    if answer.status == _INFEASIBLE:  # so no schedule of this problem is as fast as the known one
        return Exact(float("inf"), [], upper)
    if answer.x is None:
        return None
    words: Words = []
    for rank in range(problem.num_ranks):
        timed = [
            (answer.x[start(n, m)], answer.x[start(n, m)] + p.time, m, n)
            for n, p in enumerate(passes)
            if p.rank == rank
            for m in range(count)
        ]
        words.append([n for *_, n in sorted(timed)])
    bound = answer.mip_dual_bound
    return Exact(float(answer.fun), words, float(bound) if bound is not None else 0.0)


def _limit_memory(problem: Problem, pairs: dict[tuple[int, int, int, int], int], at_least) -> None:
    """At each forward: what earlier passes on the rank hold, and this one, is within the limit."""
    passes, count = problem.passes, problem.num_microbatches
    for n, p in enumerate(passes):
        limit = problem.limits[p.rank]
        if not p.hold or limit == float("inf"):
            continue
        for m in range(count):
            # terms of (held before) <= limit - hold, written as -(held before) >= hold - limit
            terms: dict[int, float] = {}
            constant = p.hold * m
            for o, q in enumerate(passes):
                change = q.hold - q.release
                if o == n or q.rank != p.rank or not change:
                    continue
                for k in range(count):
                    if o < n:
                        terms[pairs[o, k, n, m]] = -change
                    else:  # before is 1 - x
                        constant += change
                        terms[pairs[n, m, o, k]] = change
            at_least(terms, p.hold - limit + constant)
