"""Check that a schedule is legal: each task runs once, on its stage's rank, with no deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.progress import Blocked, advance
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, check_count, task_lists
from jaxpp_flax.schedules.task import MEANING, Task, TaskKind, flatten, parts, results

_SPLITS = {TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT}
_WINDOW = 5  # tasks shown before a blocked one


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
    lists, found = task_lists(schedule, num_microbatches)
    num_stages = found if num_stages is None or isinstance(schedule, Schedule) else num_stages
    # The rank of each stage; where no schedule says it, that of its first task.
    home = {n: schedule.rank_of(n) for n in range(found)} if isinstance(schedule, Schedule) else {}
    if not num_stages:
        raise ScheduleError("a schedule needs at least one task, got none")
    census = _Census(num_stages, num_microbatches, home)
    for rank, tasks in enumerate(lists):
        for position, task in enumerate(tasks):
            census.count(rank, position, task)
    census.check_complete()
    blocked = advance(lists, num_stages)
    if blocked:
        raise deadlock_error(lists, blocked)


class _Census:
    """Records the kinds of tasks seen so far for each stage and microbatch."""

    def __init__(self, num_stages: int, num_microbatches: int, home: dict[int, int]) -> None:
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.home = home
        self.seen: list[list[set[TaskKind]]] = [[set() for _ in range(num_microbatches)] for _ in range(num_stages)]

    def count(self, rank: int, position: int, task: Task) -> None:
        """Record a task; refuse one that may not be here."""
        stage, m, kinds = task.stage, task.microbatch, {part.kind for part in parts(task)}
        if not 0 <= stage < self.num_stages:
            fault = f"there are {self.num_stages} stages, numbered from 0"
        elif not 0 <= m < self.num_microbatches:
            fault = f"there are {self.num_microbatches} microbatches, numbered from 0"
        elif self.home.setdefault(stage, rank) != rank:
            fault = f"stage {stage} belongs to rank {self.home[stage]}. A stage's weights live on one rank"
        elif task.kind is TaskKind.FUSED and stage != self.num_stages - 1:
            fault = (
                f"only the last stage ({self.num_stages - 1}) can be fused, since any other one's backward waits "
                "for the next stage. Use two tasks"
            )
        elif stage == 0 and kinds & _SPLITS:
            fault = (
                "stage 0 has no split backward, since nobody waits for the gradient of its input. "
                "Use B, or pass the lists through schedules.normalize"
            )
        elif self.seen[stage][m].intersection(MEANING[task.kind].excludes):
            again = "is there twice" if self.seen[stage][m] & kinds else "comes with both B and I or W"
            fault = f"{task.cell} {again}; each task must run exactly once"
        else:
            self.seen[stage][m] |= {task.kind, *kinds}
            return
        raise ScheduleError(f"rank {rank}, position {position}: {task.cell}: {fault}")

    def check_complete(self) -> None:
        """Refuse a schedule that lacks a task."""
        splits = any(kinds & _SPLITS for listed in self.seen for kinds in listed)
        fused = [TaskKind.FUSED in kinds for kinds in self.seen[-1]]
        for stage, listed in enumerate(self.seen):
            is_fused = any(fused) and stage == self.num_stages - 1
            wanted = {TaskKind.FORWARD, *(_SPLITS if splits and stage and not is_fused else (TaskKind.BACKWARD,))}
            for m, kinds in enumerate(listed):
                if lacking := [kind for kind in TaskKind if kind in wanted - kinds]:
                    names = ", ".join(f"{stage}{kind.value}{m}" for kind in lacking)
                    whole = " (one stage is split, so all but stage 0 are)" if TaskKind.BACKWARD in kinds else ""
                    raise ScheduleError(
                        f"missing: {names}{whole}. Each of {self.num_stages} stages needs each of "
                        f"{self.num_microbatches} microbatches"
                    )
        if any(fused) and not all(fused):
            raise ScheduleError(
                f"stage {self.num_stages - 1} is fused for some microbatches and not for microbatch "
                f"{fused.index(False)}. Fuse all or none: schedules.normalize does"
            )


def deadlock_error(lists: TaskLists, blocked: Sequence[Blocked]) -> ScheduleError:
    """Return the error with a row for each rank, lined up at the blocked tasks (``>like this<``), with each reason."""
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
