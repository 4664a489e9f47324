"""Check that a schedule is legal: each task runs once, on its stage's rank, with no deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.progress import Blocked, advance
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, check_count, task_lists
from jaxpp_flax.schedules.task import MEANING, Task, TaskKind, flatten, parts, results

_SPLITS = {TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT}
_WINDOW = 5  # tasks shown before a blocked one
_Seen = list[list[set[TaskKind]]]  # the kinds so far of each stage and microbatch


def validate(
    schedule: Schedule | TaskLists,
    num_microbatches: int,
    *,
    num_stages: int | None = None,
) -> None:
    """Raise :class:`ScheduleError` if the schedule is not legal; the error draws a deadlock as a grid.

    In a legal schedule, every stage runs one forward and one backward (whole, or split in two) for
    each microbatch. Each stage is on one rank. The backward of stage 0 is whole; those of the other
    stages are all split or all whole. The tasks of the last stage are all fused or none of them is.
    No rank waits for ever.

    Args:
        schedule: a :class:`Schedule`, or each rank's tasks.
        num_microbatches: the required number of microbatches.
        num_stages: the number of stages; by default that of the :class:`Schedule`, or the highest stage of the lists
            plus 1.

    The time is linear in the number of tasks.

    >>> from jaxpp_flax.schedules import task
    >>> validate([[task.forward(0, 0), task.backward(0, 0)], [task.backward(1, 0), task.forward(1, 0)]], 1)
    Traceback (most recent call last):
    jaxpp_flax.schedules.errors.ScheduleError: deadlock: no rank can go on.
      rank 0 | 0F0 >0B0<      waits for 1B0, on rank 1
      rank 1 |     >1B0< 1F0  waits for 1F0, which this rank runs later
    JPF301: ...
    """
    check_count("num_microbatches", num_microbatches)
    lists, listed_stages = task_lists(schedule, num_microbatches)
    num_stages = listed_stages if num_stages is None or isinstance(schedule, Schedule) else num_stages
    # The rank of each stage; where no schedule says it, that of its first task.
    home = {n: schedule.rank_of(n) for n in range(listed_stages)} if isinstance(schedule, Schedule) else {}
    if not num_stages:
        raise ScheduleError("a schedule needs at least one task, got none")
    seen: _Seen = [[set() for _ in range(num_microbatches)] for _ in range(num_stages)]
    for rank, tasks in enumerate(lists):
        for position, task in enumerate(tasks):
            if fault := _fault(task, rank, home, seen):
                raise ScheduleError(f"rank {rank}, position {position}: {task.cell}: {fault}")
            seen[task.stage][task.microbatch] |= {task.kind, *(part.kind for part in parts(task))}
    _check_complete(seen)
    blocked = advance(lists, num_stages)
    if blocked:
        raise deadlock_error(lists, blocked)


def _fault(task: Task, rank: int, home: dict[int, int], seen: _Seen) -> str | None:
    """Return why a task may not be here, after the tasks that were seen."""
    stage, m, last = task.stage, task.microbatch, len(seen) - 1
    if not 0 <= stage <= last:
        return f"there are {len(seen)} stages, numbered from 0"
    if not 0 <= m < len(seen[0]):
        return f"there are {len(seen[0])} microbatches, numbered from 0"
    if home.setdefault(stage, rank) != rank:
        return f"stage {stage} belongs to rank {home[stage]}. A stage's weights live on one rank"
    if task.kind is TaskKind.FUSED and stage != last:
        return (
            f"only the last stage ({last}) can be fused, since any other one's backward waits for the next stage. Use "
            "two tasks"
        )
    if stage == 0 and task.kind in _SPLITS:
        return (
            "stage 0 has no split backward, since nobody waits for the gradient of its input. "
            "Use B, or pass the lists through schedules.normalize"
        )
    if seen[stage][m].intersection(MEANING[task.kind].excludes):
        is_twice = seen[stage][m].intersection(part.kind for part in parts(task))
        again = "is there twice" if is_twice else "comes with both B and I or W"
        return f"{task.cell} {again}; each task must run exactly once"
    return None


def _check_complete(seen: _Seen) -> None:
    """Refuse a schedule that lacks a task."""
    splits = any(kinds & _SPLITS for listed in seen for kinds in listed)
    fused = [TaskKind.FUSED in kinds for kinds in seen[-1]]
    for stage, listed in enumerate(seen):
        is_whole = not splits or stage == 0 or (any(fused) and stage == len(seen) - 1)
        wanted = {TaskKind.FORWARD, *((TaskKind.BACKWARD,) if is_whole else _SPLITS)}
        for m, kinds in enumerate(listed):
            if lacking := [kind for kind in TaskKind if kind in wanted - kinds]:
                names = ", ".join(f"{stage}{kind.value}{m}" for kind in lacking)
                whole = " (one stage is split, so all but stage 0 are)" if TaskKind.BACKWARD in kinds else ""
                raise ScheduleError(
                    f"missing: {names}{whole}. Each of {len(seen)} stages needs each of {len(listed)} microbatches"
                )
    if any(fused) and not all(fused):
        raise ScheduleError(
            f"stage {len(seen) - 1} is fused for some microbatches and not for microbatch {fused.index(False)}. "
            "Fuse all or none: schedules.normalize does"
        )


def deadlock_error(lists: TaskLists, blocked: Sequence[Blocked]) -> ScheduleError:
    """Return the error with a row for each rank, lined up at the blocked tasks (``>like this<``), with each reason."""
    blocked_on = {b.rank: b for b in blocked}
    rows: list[tuple[str, str, str, str]] = []
    for rank, tasks in enumerate(lists):
        b = blocked_on.get(rank)
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
    grid = (
        f"  rank {rank:>{label}} | {before:>{widths[0]}} {head:<{widths[1]}} {after:<{widths[2]}}  {reason}".rstrip()
        for rank, (before, head, after, reason) in enumerate(rows)
    )
    return ScheduleError("\n".join(["deadlock: no rank can go on.", *grid]))


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
