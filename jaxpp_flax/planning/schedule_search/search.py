"""Finding a schedule for given costs, links and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpp_flax.planning.loads import limits_of
from jaxpp_flax.planning.schedule_search.greedy import construct, rules
from jaxpp_flax.planning.schedule_search.local import improve
from jaxpp_flax.planning.schedule_search.problem import (
    Problem,
    Words,
    check_counts,
    check_limits,
    evaluate,
    in_dependency_order,
    lower_bound,
)
from jaxpp_flax.schedules.families.custom import CustomSchedule
from jaxpp_flax.schedules.names import by_name, names
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.costs import Costs, Transfer
from jaxpp_flax.schedules.simulation.simulate import Timeline, simulate


@dataclass(frozen=True)
class Named:
    """The results of a named schedule on the same case."""

    name: str
    makespan: float
    peak_memory: tuple[float, ...]
    fits: bool


@dataclass(frozen=True)
class Found:
    """The best schedule of a search.

    Attributes:
        schedule: the schedule, to run or to write with :func:`write_csv`.
        timeline: the simulation of the schedule.
        lower_bound: a makespan that no schedule on these ranks can beat.
        origin: the method that made the schedule.
        named: the named schedules on the same case, fastest first.
    """

    schedule: CustomSchedule
    timeline: Timeline
    lower_bound: float
    origin: str
    named: tuple[Named, ...]

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        return self.timeline.bubble

    @property
    def peak_memory(self) -> tuple[float, ...]:
        return self.timeline.peak_memory

    @property
    def proved(self) -> bool:
        """True if the schedule is at the lower bound, and so optimal."""
        return self.makespan <= self.lower_bound * (1 + 1e-9)

    @property
    def best_named(self) -> Named | None:
        """The fastest named schedule within the memory limit; None if there is none."""
        return next((named for named in self.named if named.fits), None)

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [
            f"found by {self.origin}: makespan {self.makespan:g} (lower bound {self.lower_bound:g}"
            f"{', proved optimal' if self.proved else ''}), bubble {self.bubble:.1%}",
            "peak memory by rank: " + ", ".join(f"{peak:g}" for peak in self.peak_memory),
        ]
        best = self.best_named
        if best is None:
            lines.append("no named schedule keeps within the memory limit")
        else:
            lines.append(
                f"best named: {best.name}, makespan {best.makespan:g} ({best.makespan / self.makespan - 1:+.1%})"
            )
        return "\n".join(lines)


def placements(num_ranks: int, stages_per_rank: int) -> Iterator[tuple[int, ...]]:
    """Yield the rank of each stage: stages dealt out in turn and, for two stages per rank, also in a V."""
    yield tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))
    if stages_per_rank == 2 and num_ranks > 1:
        yield tuple(range(num_ranks)) + tuple(reversed(range(num_ranks)))


def problems_of(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Costs,
    links: Transfer,
    memory_limit: float | Sequence[float] | None,
    split_backward: bool,
) -> list[Problem]:
    """Return the problems for the arguments of :func:`search`: each placement, with split and whole backwards."""
    check_counts(num_ranks, num_microbatches, stages_per_rank)
    limits = limits_of(memory_limit, num_ranks)
    problems = [
        Problem.make(placement, num_microbatches, splits=splits, costs=costs, transfer=links, limits=limits)
        for placement in placements(num_ranks, stages_per_rank)
        for splits in ((True, False) if split_backward else (False,))
    ]
    check_limits(problems[0])
    return problems


def search(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    costs: Costs | None = None,
    transfer: Transfer | float | None = None,
    memory_limit: float | Sequence[float] | None = None,
    *,
    split_backward: bool = True,
    evaluations: int = 4000,
    seed: int = 0,
) -> Found:
    """Search the best schedule for a pipeline: never slower than a named schedule within the memory limit.

    The search starts from named schedules and a grid of greedy rules. Simulated annealing improves
    the best few starts along their critical path.

    Args:
        num_ranks: number of ranks.
        num_microbatches: microbatches in a step.
        stages_per_rank: stages on each rank, dealt out in turn; two are also tried in a V.
        costs: time and memory of each stage's passes, given or measured.
        transfer: the links between ranks.
        memory_limit: activation memory of each rank (one number for all, or one for each rank), in
            the units of ``costs.activation``.
        split_backward: True if ``I`` and ``W`` may run apart.
        evaluations: the number of schedules that the annealing tries, in all.
        seed: the seed of the random choices; equal arguments give equal schedules.

    >>> found = search(4, 8, costs=Costs(backward_input=1.2, backward_weight=0.8), memory_limit=5)
    >>> found.makespan, max(found.peak_memory), found.best_named.name, found.best_named.makespan
    (27.4, 5.0, 'zero_bubble', 28.2)
    """
    costs = Costs() if costs is None else costs
    links = Transfer.of(transfer)
    problems = problems_of(num_ranks, num_microbatches, stages_per_rank, costs, links, memory_limit, split_backward)
    bound = min(lower_bound(problem) for problem in problems)
    tried = _named(problems, costs, links, split_backward)
    starts: list[tuple[float, str, Problem, Words]] = []
    for schedule, named in tried:
        if not named.fits:
            continue
        lists = schedule.tasks(num_microbatches)
        for problem in problems:
            if all(schedule.rank_of(s) == r for s, r in enumerate(problem.placement)) and (
                problem.splits or not schedule.splits_backward
            ):
                words = problem.words(lists)
                found = evaluate(problem, words)
                # Words imply FIFO order of microbatches: for a LIFO schedule this can change the memory in use.
                if found and all(problem.fits(r, word) for r, word in enumerate(words)):
                    starts.append((found[0], named.name, problem, words))
    for problem in problems:
        for rule in rules(problem):
            words = construct(problem, rule)
            found = None if words is None else evaluate(problem, words)
            if words is not None and found is not None:
                starts.append((found[0], "a greedy rule", problem, words))
        serial = _serial(problem)
        found = evaluate(problem, serial)
        if found:
            starts.append((found[0], "one microbatch at a time", problem, serial))
    best = _anneal(starts, evaluations, bound, seed)
    schedule = CustomSchedule(best[2].tasks(best[3]))
    ranking = tuple(sorted((named for _, named in tried), key=lambda named: named.makespan))
    timeline = simulate(schedule, costs, links, num_microbatches=num_microbatches)
    return Found(schedule, timeline, bound, best[1], ranking)


Start = tuple[float, str, Problem, Words]


def _anneal(starts: list[Start], evaluations: int, goal: float, seed: int) -> Start:
    """Improve the best few different starts, and return the best result."""
    starts = sorted(starts, key=lambda start: start[0])
    chosen: list[Start] = []
    seen: set[tuple[int, float]] = set()
    for start in starts:  # equal makespans of one problem are mostly equal schedules
        key = (id(start[2]), round(start[0], 9))
        if key not in seen:
            seen.add(key)
            chosen.append(start)
        if len(chosen) == 4:
            break
    best = chosen[0]
    for turn, (makespan, origin, problem, words) in enumerate(chosen):
        if best[0] <= goal * (1 + 1e-9):
            break
        share = evaluations // (2 if turn == 0 else 6)
        improved, changed = improve(problem, words, evaluations=share, goal=goal, seed=seed + turn)
        if improved < best[0] - 1e-12:
            how = origin if improved == makespan else f"{origin} and local search"
            best = (improved, how, problem, changed)
    return best


def _named(
    problems: list[Problem], costs: Costs, links: Transfer, split_backward: bool
) -> list[tuple[Schedule, Named]]:
    """Simulate every named schedule with these counts."""
    first = problems[0]
    tried: list[tuple[Schedule, Named]] = []
    for name in names(first.num_stages, first.num_ranks):
        schedule = by_name(name, first.num_stages, first.num_ranks)
        if schedule.splits_backward and not split_backward:
            continue
        step = simulate(schedule, costs, links, num_microbatches=first.num_microbatches)
        fits = all(peak <= limit * (1 + 1e-9) for peak, limit in zip(step.peak_memory, first.limits, strict=True))
        tried.append((schedule, Named(name, step.makespan, step.peak_memory, fits)))
    return tried


def _serial(problem: Problem) -> Words:
    """Return the words of one microbatch after the other, which need the least memory."""
    words: Words = [[] for _ in range(problem.num_ranks)]
    order = in_dependency_order(problem.passes)
    for _ in range(problem.num_microbatches):
        for n in order:
            words[problem.passes[n].rank].append(n)
    return words
