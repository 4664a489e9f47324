"""The interface of every schedule.

A schedule gives the tasks of each rank and their order, but no times: a task starts as soon as its
rank is free and its inputs have arrived. So any order that agrees with the data dependencies
(see :mod:`task`) is correct, and schedules differ only in idle time and memory.

**Stage 0 of a schedule that splits the backward.** No task waits for the gradient of the first
stage's input, so there is nothing to split: the named schedules with ``splits_backward`` emit the
whole ``B(0, m)`` for stage 0 and ``I``/``W`` for every other stage. This changes only the order
within one rank, so it costs no idle time.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.memory import MemoryInUse, StageBytes
from jaxpp_flax.schedules.task import Task

TaskLists = Sequence[Sequence[Task]]
"""Each rank's tasks, in order."""


def check_count(what: str, value: object) -> int:
    """Return ``value`` as a whole number of at least 1; else raise :class:`ScheduleError`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{what} must be a whole number, got {value!r}")
    count = value.__index__()  # type: ignore[union-attr]  # NumPy's integers come through here too
    if count < 1:
        raise ScheduleError(f"{what} must be at least 1, got {count}")
    return count


@dataclass(frozen=True, init=False, eq=False)
class Schedule(abc.ABC):
    """The tasks of each rank, in order. For your own schedule, write a subclass with the method ``tasks``.

    Args:
        num_stages: number of stages of the model.
        num_ranks: number of ranks (groups of devices) that run the stages; by default one for each stage.

    >>> from jaxpp_flax.schedules import Schedule, task
    >>> class OneAtATime(Schedule):  # every microbatch alone: legal, and mostly idle
    ...     def tasks(self, num_microbatches):
    ...         return [[step(stage, m) for m in range(num_microbatches)
    ...                  for step in (task.forward, task.backward)]
    ...                 for stage in range(self.num_stages)]
    >>> OneAtATime(2).tasks(2)[1]
    [fwd_1__0, bwd_1__0, fwd_1__1, bwd_1__1]
    """

    num_stages: int
    num_ranks: int

    splits_backward: ClassVar[bool] = False
    """True if stages other than the first run ``I`` and ``W`` in place of ``B``."""

    fuses_last_stage: ClassVar[bool] = False
    """True if the last stage runs each forward and backward as one task."""

    def __init__(self, num_stages: int, num_ranks: int | None = None) -> None:
        stages = check_count("num_stages", num_stages)
        ranks = stages if num_ranks is None else check_count("num_ranks", num_ranks)
        vars(self).update(num_stages=stages, num_ranks=ranks)  # the class is frozen
        self._check_ranks()

    def __eq__(self, other: object) -> bool:
        """Compare class and all attributes; a subclass's own attributes, such as a latency, count too."""
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.num_stages, self.num_ranks))

    def _check_ranks(self) -> None:
        """Refuse a number of ranks that does not divide the number of stages."""
        if self.num_stages % self.num_ranks:
            lower = self.num_stages - self.num_stages % self.num_ranks
            fits = [str(n) for n in (lower, lower + self.num_ranks) if n]
            raise ScheduleError(
                f"{type(self).__name__}: num_stages={self.num_stages} cannot be divided evenly "
                f"among num_ranks={self.num_ranks}. Use {' or '.join(fits)} stages, or a number of "
                "ranks that divides the stages"
            )

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        """Return the rank of ``stage``: ``stage % num_ranks``, unless a subclass overrides this."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of ``rank``, in increasing order."""
        return [s for s in range(self.num_stages) if self.rank_of(s) == rank]

    @abc.abstractmethod
    def tasks(self, num_microbatches: int) -> list[list[Task]]:
        """Return each rank's tasks, in the order of their execution."""

    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        """Iterate over one rank's tasks."""
        return iter(self.tasks(num_microbatches)[rank])

    def check(self, num_microbatches: int) -> None:
        """Raise :class:`ScheduleError`, with a remedy, if the schedule cannot run this number of microbatches."""
        check_count("num_microbatches", num_microbatches)

    def with_backward(self) -> Schedule:
        """Return the schedule of a loop that has backward work: itself, unless it runs forwards alone.

        The engine asks when it knows the tasks of a loop: a loss with a gradient by its inputs has backward work in an
        evaluation too.
        """
        return self

    def max_live_microbatches(self, stage: int, num_microbatches: int) -> int:
        """Return the maximum number of microbatches whose activations ``stage`` holds at one time.

        Activations live from the start of the forward to the end of the backward (the end of ``W``, if
        the backward is split).
        """
        self.check(num_microbatches)
        memory, one = MemoryInUse(), StageBytes()
        for task in self.rank_tasks(self.rank_of(stage), num_microbatches):
            for change in one.changes(task) if task.stage == stage else ():
                memory.change(change)
        return int(memory.peak)


class StreamedSchedule(Schedule):
    """A schedule with a formula for each rank's order."""

    @abc.abstractmethod
    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[Task]: ...

    def tasks(self, num_microbatches: int) -> list[list[Task]]:
        self.check(num_microbatches)
        return [list(self.rank_tasks(rank, num_microbatches)) for rank in range(self.num_ranks)]


def task_lists(schedule: Schedule | TaskLists, num_microbatches: int | None) -> tuple[TaskLists, int]:
    """Return each rank's tasks, and the number of stages; the default number of microbatches is the schedule's own."""
    if not isinstance(schedule, Schedule):
        for rank, tasks in enumerate(schedule):
            for position, task in enumerate(tasks):
                if not isinstance(task, Task):
                    raise ScheduleError(
                        f"rank {rank}, position {position}: {task!r} is not a Task. Leave idle steps "
                        "out: a task waits for its inputs by itself"
                    )
        return schedule, 1 + max((task.stage for tasks in schedule for task in tasks), default=-1)
    count = getattr(schedule, "num_microbatches", None) if num_microbatches is None else num_microbatches
    if count is None:
        raise ScheduleError(f"{schedule!r} has no number of microbatches of its own: pass num_microbatches=")
    schedule.check(count)
    return schedule.tasks(count), schedule.num_stages
