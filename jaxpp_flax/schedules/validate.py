"""Check that a schedule is legal: each task runs once, on its stage's rank, with no deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.progress import Blocked, advance
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, check_count, count_stages, streams
from jaxpp_flax.schedules.task import MEANING, AnyTask, FusedTask, Task, TaskKind, flatten, results

_BIT = {kind: 1 << n for n, kind in enumerate(TaskKind)}
_CLASH = {kind: sum(_BIT[other] for other in meaning.excludes) for kind, meaning in MEANING.items()}
_SPLITS = _BIT[TaskKind.BACKWARD_INPUT] | _BIT[TaskKind.BACKWARD_WEIGHT]
_WHOLE, _SPLIT = _BIT[TaskKind.FORWARD] | _BIT[TaskKind.BACKWARD], _BIT[TaskKind.FORWARD] | _SPLITS
_FUSED = _WHOLE | 1 << len(_BIT)

_WINDOW = 5  # tasks shown before a blocked one


def validate(
    schedule: Schedule | TaskLists,
    num_microbatches: int,
    *,
    num_stages: int | None = None,
) -> None:
    """Raise :class:`ScheduleError` if the schedule is not legal; the error draws a deadlock as a grid.

    In a legal schedule, every stage runs one forward and one backward (whole, or split in two) for
    each microbatch. Each stage is on one rank. Stage 0 is not split, and either all other stages
    are split or none. Either all tasks of the last stage are fused or none. No rank waits for ever.

    Args:
        schedule: a :class:`Schedule`, or each rank's tasks.
        num_microbatches: the required number of microbatches.
        num_stages: the number of stages; default, for lists: the highest stage in the lists plus 1.

    The time is linear in the number of tasks. A schedule that makes its tasks from a formula is not stored.

    >>> from jaxpp_flax.schedules import task
    >>> validate([[task.forward(0, 0), task.backward(0, 0)], [task.backward(1, 0), task.forward(1, 0)]], 1)
    Traceback (most recent call last):
    jaxpp_flax.schedules.errors.ScheduleError: deadlock: no rank can go on.
      rank 0 | 0F0 >0B0<      waits for 1B0, on rank 1
      rank 1 |     >1B0< 1F0  waits for 1F0, which this rank runs later
    JPF301: ...
    """
    check_count("num_microbatches", num_microbatches)
    if isinstance(schedule, Schedule):
        ranks, num_stages = streams(schedule, num_microbatches)
        home = [schedule.rank_of(stage) for stage in range(num_stages)]
    else:
        _check_types(schedule)
        num_stages = count_stages(schedule) if num_stages is None else num_stages
        home = [None] * num_stages  # the rank of a stage's first task
        ranks = schedule
    if not num_stages:
        raise ScheduleError("a schedule needs at least one task, got none")
    census = _Census(num_stages, num_microbatches, home)
    blocked = advance([census.watch(rank, tasks) for rank, tasks in enumerate(ranks)], num_stages)
    if blocked:
        lists = schedule.tasks(num_microbatches) if isinstance(schedule, Schedule) else schedule
        # A rank may wait for a task that is in no list. That is the cause, so it is reported first.
        for rank, tasks in enumerate(lists):
            census.rest(rank, tasks)
        census.check_complete()
        raise deadlock_error(lists, blocked)
    census.check_complete()


def _check_types(lists: TaskLists) -> None:
    for rank, tasks in enumerate(lists):
        for position, task in enumerate(tasks):
            if not isinstance(task, Task | FusedTask):
                raise ScheduleError(
                    f"rank {rank}, position {position}: {task!r} is not a Task. Leave idle steps "
                    "out: a task waits for its inputs by itself"
                )


class _Census:
    """Records the tasks seen so far: one byte for each stage and microbatch."""

    def __init__(self, num_stages: int, num_microbatches: int, home: Sequence[int | None]) -> None:
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.home = list(home)
        self.marks = [bytearray(num_microbatches) for _ in range(num_stages)]
        self.watched: list[int] = []

    def watch(self, rank: int, tasks: Iterable[AnyTask]) -> Iterator[AnyTask]:
        """Yield ``tasks``, and check each task when it is taken."""
        while len(self.watched) <= rank:
            self.watched.append(0)
        for task in tasks:
            self.watched[rank] += 1
            self._count(rank, self.watched[rank] - 1, task)
            yield task

    def rest(self, rank: int, tasks: Sequence[AnyTask]) -> None:
        """Check the tasks that a blocked rank never reached."""
        for position in range(self.watched[rank], len(tasks)):
            self._count(rank, position, tasks[position])

    def _count(self, rank: int, position: int, task: AnyTask) -> None:
        stage, m = task.stage, task.microbatch
        if isinstance(task, FusedTask):
            bit, clash = _FUSED, _WHOLE | _SPLIT
        else:
            bit, clash = _BIT[task.kind], _CLASH[task.kind]
        if not (0 <= stage < self.num_stages and 0 <= m < self.num_microbatches):
            fault = self._range_fault(stage)
        elif self.home[stage] != rank and self.home[stage] is not None:
            fault = f"stage {stage} belongs to rank {self.home[stage]}. A stage's weights live on one rank"
        elif bit == _FUSED and (stage != self.num_stages - 1 or not _is_pair(task)):
            fault = self._fused_fault(task)
        elif stage == 0 and bit & _SPLITS:
            fault = (
                "stage 0 has no split backward, since nobody waits for the gradient of its input. "
                "Use B, or pass the lists through schedules.normalize"
            )
        elif self.marks[stage][m] & clash:
            again = "is there twice" if self.marks[stage][m] & bit else "comes with both B and I or W"
            fault = f"{task.cell} {again}; each task must run exactly once"
        else:
            self.home[stage] = rank
            self.marks[stage][m] |= bit
            return
        raise ScheduleError(f"rank {rank}, position {position}: {task.cell}: {fault}")

    def _range_fault(self, stage: int) -> str:
        if not 0 <= stage < self.num_stages:
            return f"there are {self.num_stages} stages, numbered from 0"
        return f"there are {self.num_microbatches} microbatches, numbered from 0"

    def _fused_fault(self, task: AnyTask) -> str:
        if not _is_pair(task):
            return f"a fused task is the forward and the whole backward of one microbatch, got {task!r}"
        return (
            f"only the last stage ({self.num_stages - 1}) can be fused, since any other one's backward waits "
            "for the next stage. Use two tasks"
        )

    def check_complete(self) -> None:
        splits = any(m & _SPLITS for marks in self.marks for m in set(marks))
        for stage, marks in enumerate(self.marks):
            wanted = _SPLIT if splits and stage else _WHOLE
            if stage == self.num_stages - 1 and any(mark == _FUSED for mark in set(marks)):
                wanted = _FUSED
            if all(mark == wanted for mark in set(marks)):
                continue
            m = next(i for i, mark in enumerate(marks) if mark != wanted)
            lacking = [kind for kind, bit in _BIT.items() if wanted & ~marks[m] & bit]
            if lacking:
                names = ", ".join(f"{stage}{kind.value}{m}" for kind in lacking)
                whole = " (one stage is split, so all but stage 0 are)" if marks[m] & _BIT[TaskKind.BACKWARD] else ""
                raise ScheduleError(
                    f"missing: {names}{whole}. Each of {self.num_stages} stages needs each of "
                    f"{self.num_microbatches} microbatches"
                )
            if marks[m] & _BIT[TaskKind.BACKWARD] and wanted == _FUSED:
                raise ScheduleError(
                    f"stage {stage} is fused for some microbatches and not for microbatch {m}. "
                    "Fuse all or none: schedules.normalize does"
                )
            raise ScheduleError(f"stage {stage}, microbatch {m}: whole and split backward mixed")


def _is_pair(task: AnyTask) -> bool:
    """Return True if a fused task is the forward and the whole backward of one stage and microbatch."""
    if not isinstance(task, FusedTask):
        return False
    first, second = task.forward, task.backward
    same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
    return same and first.kind is TaskKind.FORWARD and second.kind is TaskKind.BACKWARD


def deadlock_error(lists: TaskLists, blocked: Sequence[Blocked]) -> ScheduleError:
    """Return the error that shows every rank at its blocked task, with the task it waits for and the reason."""
    return ScheduleError("deadlock: no rank can go on.\n" + blocked_grid(lists, blocked))


def blocked_grid(lists: TaskLists, blocked: Sequence[Blocked]) -> str:
    """Draw one row for each rank, lined up at the blocked tasks (``>like this<``), each with its reason."""
    at = {b.rank: b for b in blocked}
    rows: list[tuple[str, str, str, str]] = []
    for rank, tasks in enumerate(lists):
        b = at.get(rank)
        position = len(tasks) if b is None else b.position
        before = [task.cell for task in tasks[max(0, position - _WINDOW) : position]]
        if position > _WINDOW:
            before.insert(0, "..")
        after = [task.cell for task in tasks[position + 1 : position + 3]]
        if position + 3 < len(tasks):
            after.append("..")
        head = "" if b is None else f">{b.task.cell}<"
        rows.append((" ".join(before), head, " ".join(after), _reason(lists, b)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"  rank {rank:>{label}} | {before:>{widths[0]}} {head:<{widths[1]}} {after:<{widths[2]}}  {reason}".rstrip()
        for rank, (before, head, after, reason) in enumerate(rows)
    )


def _reason(lists: TaskLists, b: Blocked | None) -> str:
    if b is None:
        return "has run all its tasks"
    wanted = b.awaits
    for rank, tasks in enumerate(lists):
        for part in flatten(tasks):
            if wanted in results(part):
                where = "which this rank runs later" if rank == b.rank else f"on rank {rank}"
                return f"waits for {part.cell}, {where}"
    return f"waits for {wanted.cell}, which nobody runs"
