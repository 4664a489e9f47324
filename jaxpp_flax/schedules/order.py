"""One global order of all ranks' tasks, for a runtime that dispatches them from one place."""

from __future__ import annotations

from jaxpp_flax.schedules.schedule import TaskLists
from jaxpp_flax.schedules.simulation.simulate import simulate
from jaxpp_flax.schedules.task import Task, TaskKind, parts


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


def arrivals(task_lists: TaskLists) -> list[list[list[tuple[int, bool]]]]:
    """Return, for each rank and each of its tasks, the inputs from other stages that come before this task.

    An input is a stage, and True for the input of its forward, False for that of its backward. It is on the rank of
    its reader from its maker's dispatch on.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> arrivals(Std1F1B(2).tasks(3))  # rank 0 runs F0 F1 B0 F2 B1 B2
    [[[], [], [(0, False)], [(0, False)], [], [(0, False)]], [[(1, True), (1, True)], [], [(1, True)]]]
    """
    home = {task.stage: rank for rank, tasks in enumerate(task_lists) for task in tasks}
    found: list[list[list[tuple[int, bool]]]] = [[[] for _ in tasks] for tasks in task_lists]
    dispatched = [0] * len(task_lists)
    for rank, task in merge_order(task_lists):
        dispatched[rank] += 1
        for part in parts(task):
            is_forward = part.kind is TaskKind.FORWARD
            reader = part.stage + (1 if is_forward else -1)
            if part.kind is not TaskKind.BACKWARD_WEIGHT and reader in home:
                target = home[reader]
                found[target][dispatched[target]].append((reader, is_forward))
    return found
