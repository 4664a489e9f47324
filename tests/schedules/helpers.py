"""A second, slow and plain, model of a step, and strategies that make schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxpp_flax.schedules import Costs, Schedule, Transfer, by_name, names
from jaxpp_flax.schedules.task import Task, needs, results


def shape_of(name: str, ranks: int, per_rank: int) -> tuple[int, int]:
    """(stages, ranks) near the wanted ones on which the schedule called ``name`` can run."""
    if name in names(4, 2) and name in names(6, 2):
        return ranks * per_rank, ranks
    return (2 * ranks, ranks) if name in names(4, 2) else (ranks, ranks)


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 5, max_per_rank: int = 3) -> Schedule:
    name = draw(st.sampled_from(names()))
    stages, ranks = shape_of(name, draw(st.integers(1, max_ranks)), draw(st.integers(1, max_per_rank)))
    options = {}
    if name in ("eager_1f1b", "zero_bubble_h2"):
        options["latency"] = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.5]))
    return by_name(name, stages, ranks, **options)


def costs_for(num_stages: int) -> st.SearchStrategy[Costs]:
    times = st.lists(st.integers(0, 8).map(lambda n: n / 4), min_size=num_stages, max_size=num_stages)
    return st.builds(Costs, forward=times, backward_input=times, backward_weight=times, activation=times, sent=times)


def brute_force(lists, costs: Costs, transfer: Transfer) -> dict[Task, tuple[float, float]]:
    """Start and end of every task, by relaxing all constraints until nothing moves."""
    num_stages = 1 + max(task.stage for tasks in lists for task in tasks)
    table = costs.table(num_stages)
    times = {task: (0.0, table.duration(task)) for tasks in lists for task in tasks}
    owner = {result: (task, r) for r, tasks in enumerate(lists) for task in tasks for result in results(task)}
    for _ in range(len(times) + 1):
        before = dict(times)
        for rank, tasks in enumerate(lists):
            for i, task in enumerate(tasks):
                start = times[tasks[i - 1]][1] if i else 0.0
                for need in needs(task, num_stages):
                    maker, source = owner[need]
                    wait = transfer.time(source, rank, table.sent_bytes(need))
                    start = max(start, times[maker][1] + (wait if source != rank else 0.0))
                times[task] = (start, start + table.duration(task))
        if times == before:
            return times
    raise AssertionError("the times do not settle: there is a cycle")
