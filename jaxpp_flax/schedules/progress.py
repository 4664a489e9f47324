"""Run a schedule's ranks with its data dependencies, in one pass.

The validation and the simulator use the one function here. Its time is linear in the number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxpp_flax.schedules.schedule import TaskLists
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable
from jaxpp_flax.schedules.task import Task, TaskKind, needs, results

Emit = Callable[[int, Task, float, float], None]
Delay = Callable[[int, int, Task], float]
Hold = Callable[[int, int, float, float], float]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: its next task, that task's position, and the task that it waits for."""

    rank: int
    position: int
    task: Task
    awaits: Task


_Reads = tuple[tuple[int, Task], ...]
_Row = tuple[_Reads, tuple[int, ...], float]
"""What a task of microbatch 0 reads, with the tasks that make it, what it makes, and its time. Results are numbers."""


_NUMBER = {kind: number for number, kind in enumerate(TaskKind)}


def _row(task: Task, table: CostTable, num_stages: int) -> _Row:
    def number(result: Task) -> int:
        return result.stage * len(_NUMBER) + _NUMBER[result.kind]

    reads = tuple((number(need), need) for need in needs(task, num_stages))
    return reads, tuple(map(number, results(task))), table.duration(task)


def advance(
    ranks: TaskLists,
    num_stages: int,
    emit: Emit | None = None,
    *,
    table: CostTable | None = None,
    delay: Delay | None = None,
    hold: Hold | None = None,
) -> list[Blocked]:
    """Run every rank as far as possible, and return the blocked ranks.

    Args:
        ranks: each rank's tasks, in their order.
        num_stages: number of stages; the last stage's backward waits for no other stage.
        emit: called with ``(rank, task, start, end)`` once for each task. The order of calls is
            legal, and each rank's calls are in its own order; across ranks they are not by time.
        table: the time of each kind of task on each stage; by default that of :class:`Costs`.
        delay: ``delay(source, target, task)``, the time that the result of ``task``, of any microbatch, takes from
            rank to rank. Not called within a rank. None: no time.
        hold: ``hold(rank, position, free, start)``, the time when a task can start whose rank is free, and whose
            inputs have arrived, at these times. None: at ``start``.
    """
    table = Costs().table(num_stages) if table is None else table
    rows = {kind: [_row(Task(kind, stage, 0), table, num_stages) for stage in range(num_stages)] for kind in TaskKind}
    ends: dict[int, tuple[float, int]] = {}  # when and on which rank
    waiting: dict[int, list[int]] = {}  # the ranks that wait for a result
    ready: list[int] = []  # the ranks whose result is there

    def run(rank: int, tasks: Sequence[Task]) -> Iterator[Blocked | None]:
        now = 0.0
        for position, task in enumerate(tasks):
            reads, writes, time = rows[task.kind][task.stage]
            first = task.microbatch * num_stages * len(_NUMBER)
            start = now
            for number, need in reads:
                while (result := ends.get(first + number)) is None:
                    waiting.setdefault(first + number, []).append(rank)
                    yield Blocked(rank, position, task, replace(need, microbatch=task.microbatch))
                arrived, source = result
                if delay is not None and source != rank:
                    arrived += delay(source, rank, need)
                if arrived > start:
                    start = arrived
            if hold is not None:
                start = hold(rank, position, now, start)
            now = start + time
            for number in writes:
                ends[first + number] = now, rank
                if first + number in waiting:
                    ready.extend(waiting.pop(first + number))
            if emit is not None:
                emit(rank, task, start, now)
        yield None  # it has run all

    steps = [run(rank, tasks) for rank, tasks in enumerate(ranks)]
    blocked = [next(step) for step in steps]
    while ready:
        rank = ready.pop()
        blocked[rank] = next(steps[rank])
    return [each for each in blocked if each is not None]
