"""A user's own schedule: a plain list of tasks for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import Task, TaskKind, backward, backward_input, backward_weight, flatten, fused, parts
from jaxpp_flax.schedules.validate import validate

_SPLITS = TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


def normalize(task_lists: Sequence[Sequence[Task | None]]) -> list[list[Task]]:
    """Return the same schedule in the form that :func:`validate` and the engine need.

    Idle steps (None) are removed. For stage 0, ``I`` becomes the whole ``B``, and ``W`` is removed. If
    the backward of any stage is split, the ``B`` of every other stage becomes ``I`` and ``W``. If each
    forward of the last stage is directly followed by its whole backward, the last stage's tasks are
    fused; otherwise none of them is.

    >>> from jaxpp_flax.schedules import Task, TaskKind
    >>> forward, backward = (Task(kind, 0, 0) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD))
    >>> normalize([[forward, None, backward]])
    [[FusedTask(fwd_0__0, bwd_0__0)]]
    """
    plain = [list(flatten(task for task in tasks if task is not None)) for tasks in task_lists]
    splits = any(task.stage and task.kind in _SPLITS for tasks in plain for task in tasks)
    last = max((task.stage for tasks in plain for task in tasks), default=0)

    def replaced(task: Task) -> tuple[Task, ...]:
        stage, m = task.stage, task.microbatch
        if stage == 0 and task.kind in _SPLITS:
            return (backward(0, m),) if task.kind is TaskKind.BACKWARD_INPUT else ()
        if stage and splits and task.kind is TaskKind.BACKWARD:
            return backward_input(stage, m), backward_weight(stage, m)
        return (task,)

    return [_fuse([new for task in tasks for new in replaced(task)], last) for tasks in plain]


def _fuse(tasks: list[Task], last: int) -> list[Task]:
    """One rank's plain tasks, with the last stage's fused if all of them can be."""
    out: list[Task] = []
    for task in tasks:
        pair = fused(last, task.microbatch)
        if out and parts(pair) == (out[-1], task):
            out[-1] = pair
        else:
            out.append(task)
    return out if all(task.kind is TaskKind.FUSED for task in out if task.stage == last) else tasks


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
    _lists: list[list[Task]]
    _home: dict[int, int]

    def __init__(self, task_lists: Sequence[Sequence[Task | None]]) -> None:
        lists = normalize(task_lists)
        everything = [task for tasks in lists for task in tasks]
        if not everything:
            raise ScheduleError("a schedule needs at least one task, got none")
        super().__init__(1 + max(task.stage for task in everything), len(lists))
        vars(self).update(
            num_microbatches=1 + max(task.microbatch for task in everything),
            splits_backward=any(task.kind is TaskKind.BACKWARD_INPUT for task in everything),
            fuses_last_stage=any(task.kind is TaskKind.FUSED for task in everything),
            _lists=lists,
            _home={task.stage: rank for rank, tasks in enumerate(lists) for task in tasks},
        )
        validate(lists, self.num_microbatches, num_stages=self.num_stages)

    def _check_ranks(self) -> None:
        """Accept all numbers: any stage may be on any rank."""

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

    def tasks(self, num_microbatches: int) -> list[list[Task]]:
        self.check(num_microbatches)
        return [list(tasks) for tasks in self._lists]
