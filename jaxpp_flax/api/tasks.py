"""The tasks of JaxPP's schedules."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import cast

from jaxpp_flax.schedules import task as own

__all__ = ["OWN_KIND", "FusedTask", "ScheduleTasks", "Task", "TaskType"]


class TaskType(enum.Enum):
    """The kind of a task: forward, backward, and the two halves of a split backward.

    Example:
      >>> TaskType.BWD_I, TaskType.BWD.default_latency
      (TaskType.BWD_I, 2)
    """

    FWD = 1
    BWD = 2
    BWD_I = 3
    BWD_W = 4

    def __repr__(self) -> str:
        return str(self)

    @property
    def default_latency(self) -> int:
        """The time of a task in units of a forward."""
        return 2 if self is TaskType.BWD else 1


_PREFIX = {TaskType.FWD: "fwd_", TaskType.BWD: "bwd_", TaskType.BWD_I: "bwdA_", TaskType.BWD_W: "bwdW_"}
OWN_KIND = {
    TaskType.FWD: own.TaskKind.FORWARD,
    TaskType.BWD: own.TaskKind.BACKWARD,
    TaskType.BWD_I: own.TaskKind.BACKWARD_INPUT,
    TaskType.BWD_W: own.TaskKind.BACKWARD_WEIGHT,
}
_OF_ITS_KIND = cast(int, None)


@dataclass(frozen=True)
class Task:
    """One pass of a stage over a microbatch. The latency does not count in comparisons, and does not change a step.

    Args:
      stage_id, mubatch_idx, fwd_or_bwd: the stage, the microbatch and the kind.
      latency: by default the kind's `default_latency`; JaxPP's versions up to August 2025 have no such parameter.

    Example:
      >>> print(Task.make(2, 0, TaskType.BWD_I))
      bwdA_2__0
    """

    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType
    latency: int = field(default=_OF_ITS_KIND, compare=False)

    def __post_init__(self) -> None:
        if self.latency is _OF_ITS_KIND:
            object.__setattr__(self, "latency", self.fwd_or_bwd.default_latency)

    @classmethod
    def make(cls, stage_id: int, mubatch_idx: int, fwd_or_bwd: TaskType, latency: int | None = None) -> Task:
        """Make a task, as the constructor does."""
        return cls(stage_id, mubatch_idx, fwd_or_bwd, _OF_ITS_KIND if latency is None else latency)

    def __str__(self) -> str:
        return f"{_PREFIX[self.fwd_or_bwd]}{self.stage_id}__{self.mubatch_idx}"


class FusedTask(tuple[Task, ...]):
    """Tasks that run directly after one another on one rank, of any stages and microbatches.

    Example:
      >>> pair = FusedTask((Task.make(1, 1, TaskType.FWD), Task.make(1, 0, TaskType.BWD)))
      >>> str(pair), pair.latency
      ('FusedTask(fwd_1__1, bwd_1__0)', 3)
    """

    __slots__ = ()

    @property
    def latency(self) -> int:
        """The sum of its tasks' latencies."""
        return sum(task.latency for task in self)

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self))})"


ScheduleTasks = list[list[Task | FusedTask | None]]
"""The tasks of each rank in order; None is an idle step."""
