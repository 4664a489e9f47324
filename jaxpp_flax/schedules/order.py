"""One global order of all ranks' tasks, for a runtime that dispatches them from one place."""

from __future__ import annotations

from jaxpp_flax.schedules.progress import advance
from jaxpp_flax.schedules.schedule import TaskLists, count_stages
from jaxpp_flax.schedules.task import AnyTask
from jaxpp_flax.schedules.validate import deadlock_error


def merge_order(task_lists: TaskLists) -> list[tuple[int, AnyTask]]:
    """Return all tasks with their ranks, in one order without deadlock.

    The order agrees with every rank's own order and with the dependencies. Tasks are sorted by their start
    times in a simulation (a forward takes 1, a whole backward 2), ties by rank. So a runtime that dispatches
    in this order keeps no rank waiting for the dispatch of another rank. The order is deterministic.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> [task for rank, task in merge_order(Std1F1B(2).tasks(2))]
    [fwd_0__0, fwd_0__1, FusedTask(fwd_1__0, bwd_1__0), bwd_0__0, FusedTask(fwd_1__1, bwd_1__1), bwd_0__1]
    """
    started: list[tuple[float, int, AnyTask]] = []

    def emit(rank: int, task: AnyTask, start: float, end: float) -> None:
        started.append((start, rank, task))

    blocked = advance(task_lists, count_stages(task_lists), emit)
    if blocked:
        raise deadlock_error(task_lists, blocked)
    # A rank starts one task at a time, so (start, rank) is unique, and a task's inputs ended, and
    # so began, strictly before it starts.
    started.sort(key=lambda item: item[:2])
    return [(rank, task) for _, rank, task in started]
