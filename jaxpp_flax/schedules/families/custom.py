"""A user's own schedule: a plain list of tasks for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import AnyTask, FusedTask, Task, TaskKind, flatten
from jaxpp_flax.schedules.validate import validate

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


def normalize(task_lists: Sequence[Sequence[AnyTask | None]]) -> list[list[AnyTask]]:
    """Return the same schedule in the form that :func:`validate` and the engine need.

    Idle steps (None) are removed. For stage 0, ``I`` becomes the whole ``B``, and ``W`` is removed. If
    the backward of any stage is split, the ``B`` of every other stage becomes ``I`` and ``W``. If each
    forward of the last stage is directly followed by its whole backward, the last stage's tasks are
    fused; otherwise none of them is.

    >>> from jaxpp_flax.schedules.task import forward, backward
    >>> normalize([[forward(0, 0), None, backward(0, 0)]])
    [[FusedTask(fwd_0__0, bwd_0__0)]]
    """
    plain = [list(flatten(task for task in tasks if task is not None)) for tasks in task_lists]
    splits = any(t.stage and t.kind in (_I, _W) for tasks in plain for t in tasks)
    last = max((t.stage for tasks in plain for t in tasks), default=0)
    out: list[list[AnyTask]] = []
    for tasks in plain:
        rank: list[AnyTask] = []
        for task in tasks:
            if task.stage == 0:
                if task.kind is not _W:
                    rank.append(Task(_B, 0, task.microbatch) if task.kind is _I else task)
            elif splits and task.kind is _B:
                rank += [Task(_I, task.stage, task.microbatch), Task(_W, task.stage, task.microbatch)]
            else:
                rank.append(task)
        out.append(rank)
    return [_fuse(tasks, last) for tasks in out]


def _fuse(tasks: list[AnyTask], last: int) -> list[AnyTask]:
    """One rank's plain tasks, with the last stage's fused if all of them can be."""
    out: list[AnyTask] = []
    position = 0
    while position < len(tasks):
        task = tasks[position]
        if isinstance(task, Task) and task.stage == last:
            backward = Task(_B, last, task.microbatch)
            if task.kind is not _F or position + 1 == len(tasks) or tasks[position + 1] != backward:
                return tasks
            out.append(FusedTask(task, backward))
            position += 1
        else:
            out.append(task)
        position += 1
    return out


class CustomSchedule(Schedule):
    """A schedule given as each rank's tasks, checked when it is made.

    Args:
        task_lists: each rank's tasks in order; None stands for an idle step and is left out.

    Raises:
        ScheduleError: if there are no tasks, or they are not a legal schedule (see :func:`validate`); by ``tasks``, for
            another number of microbatches.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> mine = CustomSchedule(Std1F1B(2).tasks(3))
    >>> mine
    CustomSchedule(num_stages=2, num_ranks=2, num_microbatches=3)
    >>> mine.tasks(4)
    Traceback (most recent call last):
    jaxpp_flax.schedules.errors.ScheduleError: this schedule was written for 3 microbatches, got 4...
    """

    num_microbatches: int

    def __init__(self, task_lists: Sequence[Sequence[AnyTask | None]]) -> None:
        lists = normalize(task_lists)
        everything = [task for tasks in lists for task in tasks]
        if not everything:
            raise ScheduleError("a schedule needs at least one task, got none")
        object.__setattr__(self, "num_stages", 1 + max(task.stage for task in everything))
        object.__setattr__(self, "num_ranks", len(lists))
        object.__setattr__(self, "num_microbatches", 1 + max(task.microbatch for task in everything))
        object.__setattr__(self, "_lists", tuple(tuple(tasks) for tasks in lists))
        validate(lists, self.num_microbatches, num_stages=self.num_stages)
        home = {task.stage: rank for rank, tasks in enumerate(lists) for task in tasks}
        object.__setattr__(self, "_home", tuple(home[stage] for stage in range(self.num_stages)))
        splits = any(isinstance(task, Task) and task.kind is _I for task in everything)
        object.__setattr__(self, "splits_backward", splits)
        fuses = any(isinstance(task, FusedTask) for task in everything)
        object.__setattr__(self, "fuses_last_stage", fuses)

    _lists: tuple[tuple[AnyTask, ...], ...]
    _home: tuple[int, ...]

    def __repr__(self) -> str:
        return (
            f"CustomSchedule(num_stages={self.num_stages}, num_ranks={self.num_ranks}, "
            f"num_microbatches={self.num_microbatches})"
        )

    def rank_of(self, stage: int) -> int:
        return self._home[stage]

    def check(self, num_microbatches: int) -> None:
        if num_microbatches != self.num_microbatches:
            raise ScheduleError(
                f"this schedule was written for {self.num_microbatches} microbatches, got {num_microbatches}. "
                f"Use num_microbatches={self.num_microbatches}, or write it for {num_microbatches}"
            )

    def tasks(self, num_microbatches: int) -> list[list[AnyTask]]:
        self.check(num_microbatches)
        return [list(tasks) for tasks in self._lists]
