"""One global order of all ranks' tasks, for a runtime that dispatches them from one place."""

from __future__ import annotations

from jaxpp_flax.schedules.schedule import TaskLists
from jaxpp_flax.schedules.simulation.simulate import simulate
from jaxpp_flax.schedules.task import Task


def merge_order(task_lists: TaskLists) -> list[tuple[int, Task]]:
    """Return all tasks with their ranks, in one order without deadlock.

    The order agrees with every rank's own order and with the dependencies. Tasks are sorted by their start
    times in a simulation (a forward takes 1, a whole backward 2); equal times are sorted by rank. If a runtime
    dispatches in this order, no rank waits for the dispatch of another rank. The order is deterministic.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> [task for rank, task in merge_order(Std1F1B(2).tasks(2))]
    [fwd_0__0, fwd_0__1, FusedTask(fwd_1__0, bwd_1__0), bwd_0__0, FusedTask(fwd_1__1, bwd_1__1), bwd_0__1]
    """
    started = [event for events in simulate(task_lists).events for event in events]
    # A rank starts one task at a time, so (start, rank) is unique, and a task's inputs ended, and
    # so began, strictly before it starts.
    started.sort(key=lambda event: (event.start, event.rank))
    return [(event.rank, event.task) for event in started]
