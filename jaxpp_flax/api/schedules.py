"""JaxPP's schedules: the same classes, tasks and printed forms, built on this package's schedules.

A schedule class written for JaxPP works unchanged: a frozen dataclass derived from `BaseSchedule`, with
`tasks(n_mubatches)` and, if a rank runs several stages, `get_mpmd_idx(stage_id)`.

Example:
  >>> import dataclasses
  >>> @dataclasses.dataclass(eq=True, frozen=True)
  ... class OneAtATime(BaseSchedule):
  ...     def tasks(self, n_mubatches):
  ...         return [[Task.make(stage, m, kind) for m in range(n_mubatches) for kind in (TaskType.FWD, TaskType.BWD)]
  ...                 for stage in range(self.num_stages)]
  >>> [str(task) for task in OneAtATime(2).tasks(2)[1]]
  ['fwd_1__0', 'bwd_1__0', 'fwd_1__1', 'bwd_1__1']
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxpp_flax import schedules
from jaxpp_flax.api.tasks import OWN_KIND, FusedTask, ScheduleTasks, Task, TaskType
from jaxpp_flax.schedules import task as own
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.schedule import check_count

__all__ = [
    "BaseSchedule",
    "DualPipeV",
    "Eager1F1B",
    "FusedTask",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedBaseSchedule",
    "InterleavedGPipe",
    "KimiK2",
    "ScheduleTasks",
    "Std1F1B",
    "Task",
    "TaskType",
    "ZeroBubble",
    "own_schedule",
]


_TYPE = {kind: type_ for type_, kind in OWN_KIND.items()}


@dataclass(frozen=True)
class BaseSchedule(abc.ABC):
    """The order of each rank's tasks. A subclass defines `tasks`.

    Args:
      num_stages: number of stages of the model.

    Raises:
      ScheduleError: if `num_stages` is below 1.
    """

    num_stages: int
    is_partial_bwd: bool = field(default=False, init=False)
    """True if a stage's backward is split into `BWD_I` and `BWD_W`."""

    def __post_init__(self) -> None:
        check_count("num_stages", self.num_stages)

    def get_mpmd_idx(self, stage_id: int) -> int:
        """Return the rank of a stage."""
        return stage_id

    def check(self, n_mubatches: int) -> None:
        """Raise a `ScheduleError` if the schedule cannot run this number of microbatches."""
        check_count("n_mubatches", n_mubatches)

    @abc.abstractmethod
    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        """Return the tasks of each rank in order."""


@dataclass(frozen=True)
class InterleavedBaseSchedule(BaseSchedule):
    """A schedule with several stages on each rank: stage `s` is on rank `s % mpmd_dim`. A subclass defines `tasks`.

    Args:
      num_stages: number of stages of the model, a multiple of `mpmd_dim`.
      mpmd_dim: number of ranks.

    Raises:
      ScheduleError: if one of the numbers is below 1, or `num_stages` is not a multiple of `mpmd_dim`.
    """

    mpmd_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("mpmd_dim", self.mpmd_dim)
        if self.num_stages % self.mpmd_dim:
            raise ScheduleError(
                f"{type(self).__name__}: num_stages={self.num_stages} can not be evenly divided by "
                f"mpmd_dim={self.mpmd_dim}. Make the number of stages a multiple of the number of ranks"
            )

    def get_mpmd_idx(self, stage_id: int) -> int:
        return stage_id % self.mpmd_dim


@dataclass(frozen=True)
class _MadeOfOurs(BaseSchedule):
    """One of this package's schedules, with JaxPP's tasks."""

    made_by: ClassVar[type[schedules.Schedule]]

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = self.own()
        object.__setattr__(self, "mpmd_dim", schedule.num_ranks)
        object.__setattr__(self, "is_partial_bwd", schedule.splits_backward)

    def own(self) -> schedules.Schedule:
        return self.made_by(self.num_stages, self.mpmd_dim)  # pyright: ignore[reportAttributeAccessIssue]

    def get_mpmd_idx(self, stage_id: int) -> int:
        return self.own().rank_of(stage_id)

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        return [_listed(tasks, self.is_partial_bwd) for tasks in self.own().tasks(n_mubatches)]


@dataclass(frozen=True)
class _OneStageEach(_MadeOfOurs):
    """A schedule of one stage on each rank. `mpmd_dim` is a parameter of ROCm's version."""

    mpmd_dim: int | None = None


@dataclass(frozen=True)
class _SeveralStagesEach(_MadeOfOurs, InterleavedBaseSchedule):
    """A schedule of several stages on each rank."""


class Std1F1B(_OneStageEach):
    """`jaxpp_flax.schedules.Std1F1B`, with JaxPP's tasks."""

    made_by = schedules.Std1F1B


class Eager1F1B(_OneStageEach):
    """`jaxpp_flax.schedules.Eager1F1B`, with JaxPP's tasks."""

    made_by = schedules.Eager1F1B


class GPipe(_OneStageEach):
    """`jaxpp_flax.schedules.GPipe`, with JaxPP's tasks."""

    made_by = schedules.GPipe


class ZeroBubble(_OneStageEach):
    """`jaxpp_flax.schedules.ZeroBubble`, with JaxPP's tasks."""

    made_by = schedules.ZeroBubble


@dataclass(frozen=True)
class Interleaved1F1B(_SeveralStagesEach):
    """`jaxpp_flax.schedules.Interleaved1F1B`, with JaxPP's tasks.

    Args:
      num_stages, mpmd_dim: the numbers of stages and of ranks.
      fuse_steady_state: True lists each forward and the backward that directly follows it as one task. The order of
        the work is the same.
    """

    fuse_steady_state: bool = False
    made_by: ClassVar[type[schedules.Schedule]] = schedules.Interleaved1F1B

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        stages = range(self.num_stages) if self.fuse_steady_state else (self.num_stages - 1,)
        return [_paired(tasks, stages) for tasks in super().tasks(n_mubatches)]


class KimiK2(Interleaved1F1B):
    """`jaxpp_flax.schedules.KimiK2`, with JaxPP's tasks; the last stage fuses a forward and the backward after it."""

    made_by = schedules.KimiK2


class InterleavedGPipe(_SeveralStagesEach):
    """`jaxpp_flax.schedules.InterleavedGPipe`, with JaxPP's tasks."""

    made_by = schedules.InterleavedGPipe


class DualPipeV(_SeveralStagesEach):
    """`jaxpp_flax.schedules.DualPipeV`, with JaxPP's tasks.

    Raises:
      ScheduleError: if there are not two stages for each rank. `tasks` raises it if there are fewer microbatches than
        stages.
    """

    made_by = schedules.DualPipeV

    def check(self, n_mubatches: int) -> None:
        if n_mubatches < self.num_stages:
            raise ScheduleError(
                f"DualPipeV requires n_mubatches={n_mubatches} >= num_stages={self.num_stages} "
                f"(mpmd_dim={self.mpmd_dim}), as in JaxPP. Use more microbatches, or "
                "`jaxpp_flax.schedules.DualPipeV`, which takes any number"
            )

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        self.check(n_mubatches)
        return super().tasks(n_mubatches)


# A user's subclass is not here: it may list other tasks.
_OURS = (Std1F1B, Eager1F1B, GPipe, ZeroBubble, Interleaved1F1B, KimiK2, InterleavedGPipe, DualPipeV)


def own_schedule(schedule: Any, num_microbatches: int) -> Any:
    """Return this package's schedule with the tasks of a JaxPP schedule; any other value as it is.

    Args:
      schedule: a schedule of this file, or an object with JaxPP's `num_stages`, `get_mpmd_idx` and `tasks`.
      num_microbatches: the length of the loop.

    Raises:
      ScheduleError: if `tasks` lists no legal schedule, or lists a stage on another rank than `get_mpmd_idx` gives.

    Example:
      >>> own_schedule(Std1F1B(2), 4)
      Std1F1B(num_stages=2, num_ranks=2)
    """
    if isinstance(schedule, schedules.Schedule) or not hasattr(schedule, "get_mpmd_idx"):
        return schedule
    if type(schedule) in _OURS:
        schedule.check(num_microbatches)
        return schedule.own()
    name, listed = type(schedule).__name__, schedule.tasks(num_microbatches)
    lists = [[part for item in tasks for part in _own_tasks(item, name, rank)] for rank, tasks in enumerate(listed)]
    own = schedules.CustomSchedule(lists)
    for stage in range(own.num_stages):
        if own.rank_of(stage) != schedule.get_mpmd_idx(stage):
            raise ScheduleError(
                f"{name}.tasks lists stage {stage} on rank {own.rank_of(stage)}, but {name}.get_mpmd_idx({stage}) is "
                f"{schedule.get_mpmd_idx(stage)}. Make the two agree"
            )
    return own


def _own_tasks(item: Any, schedule: str, rank: int) -> Iterator[own.Task]:
    """Yield the tasks of one item of a JaxPP schedule's list."""
    if isinstance(item, FusedTask):
        for part in item:
            yield from _own_tasks(part, schedule, rank)
    elif isinstance(item, Task):
        yield own.Task(OWN_KIND[item.fwd_or_bwd], item.stage_id, item.mubatch_idx)
    elif isinstance(item, own.Task):
        yield item
    elif item is not None:
        raise ScheduleError(
            f"{schedule}.tasks lists {item!r} for rank {rank}. Its items are `Task`s, `FusedTask`s, or None for an "
            "idle step"
        )


def _listed(tasks: list[own.Task], is_partial_bwd: bool) -> list[Task | FusedTask | None]:
    """Return one rank's tasks as JaxPP lists them: stage 0's backward, which stays whole here, is in two halves too."""
    listed: list[Task | FusedTask | None] = []
    for task in own.flatten(tasks):
        split = is_partial_bwd and task.kind is own.TaskKind.BACKWARD
        types = (TaskType.BWD_I, TaskType.BWD_W) if split else (_TYPE[task.kind],)
        listed.extend(Task.make(task.stage, task.microbatch, type_) for type_ in types)
    return listed


def _paired(tasks: list[Task | FusedTask | None], stages: range | tuple[int, ...]) -> list[Task | FusedTask | None]:
    """Fuse each forward of `stages` with the backward directly after it; only the steady state has such pairs."""
    paired: list[Task | FusedTask | None] = []
    for task in tasks:
        before = paired[-1] if paired else None
        if (
            isinstance(task, Task) and isinstance(before, Task) and before.stage_id in stages
            and (before.fwd_or_bwd, task.fwd_or_bwd) == (TaskType.FWD, TaskType.BWD)
        ):  # fmt: skip
            paired[-1] = FusedTask((before, task))
        else:
            paired.append(task)
    return paired
