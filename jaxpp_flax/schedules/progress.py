"""Run a schedule's ranks with its data dependencies, in one pass.

The validation, the order of dispatch and the simulator use the one function here. Its time is linear in
the number of tasks, and it holds only the results that another task will still read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxpp_flax.schedules.simulation.costs import Costs, CostTable
from jaxpp_flax.schedules.task import MEANING, AnyTask, FusedTask, Task, TaskKind, fused, parts

Emit = Callable[[int, AnyTask, float, float], None]
Delay = Callable[[int, int, Task], float]
Hold = Callable[[int, int, float, float], float]

_DEPENDENCIES = list(dict.fromkeys(read for meaning in MEANING.values() for read in meaning.reads))


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: its next task, the position of that task, and the task that it waits for."""

    rank: int
    position: int
    task: AnyTask
    awaits: Task


_Row = tuple[tuple[tuple[int, TaskKind, int], ...], tuple[int, ...], float]
"""A task's results read, its results that others read, and its time, for microbatch 0.

A result is read by its key, with the kind and the stage of its maker. A key numbers a dependency and the
maker's stage: a result has one key for each of its readers.
"""


def _row(task: AnyTask, table: CostTable, num_stages: int) -> _Row:
    reads: dict[int, tuple[TaskKind, int]] = {}
    writes: list[int] = []
    for part in parts(task):
        for number, read in enumerate(_DEPENDENCIES):
            maker, reader = part.stage + read.stage, part.stage - read.stage
            if read in MEANING[part.kind].reads and 0 <= maker < num_stages:
                reads[maker * len(_DEPENDENCIES) + number] = read.makers[0], maker
            if part.kind in read.makers and 0 <= reader < num_stages:
                writes.append(part.stage * len(_DEPENDENCIES) + number)
    read = tuple((key, *maker) for key, maker in reads.items() if key not in writes)
    return read, tuple(key for key in writes if key not in reads), table.duration(task)


class _Run:
    """The results and the ranks of one call of :func:`advance`."""

    def __init__(
        self, num_stages: int, emit: Emit | None, table: CostTable, delay: Delay | None, hold: Hold | None
    ) -> None:
        self.keys = num_stages * len(_DEPENDENCIES)  # of one microbatch
        self.rows = {
            kind: [_row(Task(kind, stage, 0), table, num_stages) for stage in range(num_stages)] for kind in TaskKind
        }
        self.fused_rows = [_row(fused(stage, 0), table, num_stages) for stage in range(num_stages)]
        self.emit = emit
        self.delay = delay
        self.hold = hold
        self.made: dict[int, tuple[float, int]] = {}  # when and on which rank, until the result is read
        self.waiting: dict[int, int] = {}  # the rank that waits for a result
        self.ready: list[int] = []  # the ranks whose result is there

    def rank(self, rank: int, tasks: Iterable[AnyTask]) -> Iterator[tuple[int, AnyTask, Task] | None]:
        """Run one rank's tasks; yield the position, the task and what it waits for; at the end, yield None."""
        # Schedules may have tens of millions of tasks, and attribute look-ups would take much of the time.
        keys, rows, fused_rows, emit, delay = self.keys, self.rows, self.fused_rows, self.emit, self.delay
        made, waiting, ready, hold = self.made, self.waiting, self.ready, self.hold
        now = 0.0
        for position, task in enumerate(tasks):
            kind_rows = fused_rows if isinstance(task, FusedTask) else rows[task.kind]
            reads, writes, time = kind_rows[task.stage]
            m = task.microbatch
            first_key = m * keys
            start = now
            for key, kind, stage in reads:
                key += first_key
                while (result := made.pop(key, None)) is None:
                    waiting[key] = rank
                    yield position, task, Task(kind, stage, m)
                arrived, source = result
                if delay is not None and source != rank:
                    arrived += delay(source, rank, Task(kind, stage, m))
                if arrived > start:
                    start = arrived
            if hold is not None:
                start = hold(rank, position, now, start)
            now = start + time
            result = now, rank
            for key in writes:
                key += first_key
                made[key] = result
                if key in waiting:
                    ready.append(waiting.pop(key))
            if emit is not None:
                emit(rank, task, start, now)
        yield None


def advance(
    ranks: Iterable[Iterable[AnyTask]],
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
        delay: ``delay(source, target, task)``, the time that the result of ``task`` takes from
            rank to rank. Not called within a rank. None: no time.
        hold: ``hold(rank, position, free, start)``, the time when a task can start whose rank is free, and whose
            inputs have arrived, at these times. None: at ``start``.
    """
    run = _Run(num_stages, emit, Costs().table(num_stages) if table is None else table, delay, hold)
    steps = [run.rank(rank, tasks) for rank, tasks in enumerate(ranks)]
    waits = [next(step) for step in steps]
    while run.ready:
        rank = run.ready.pop()
        waits[rank] = next(steps[rank])
    return [Blocked(rank, *wait) for rank, wait in enumerate(waits) if wait is not None]
