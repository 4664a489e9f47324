"""The unit of work of a schedule: one pass of one stage over one microbatch."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class TaskKind(enum.Enum):
    """What a task computes. The value is the letter used in grids and CSV files.

    ``BACKWARD`` computes the gradients of a stage's input and of its weights. A schedule which
    splits the backward pass (zero bubble) runs ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT`` instead:
    the previous stage waits for the first alone, so the second may fill a bubble.

    >>> TaskKind("I")
    <TaskKind.BACKWARD_INPUT: 'I'>
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


_PREFIX = {
    TaskKind.FORWARD: "fwd",
    TaskKind.BACKWARD: "bwd",
    TaskKind.BACKWARD_INPUT: "bwd_i",
    TaskKind.BACKWARD_WEIGHT: "bwd_w",
}


@dataclass(frozen=True, slots=True, repr=False)
class Task:
    """One pass (``kind``) of ``stage`` over ``microbatch``.

    >>> Task(TaskKind.FORWARD, stage=2, microbatch=0)
    fwd_2__0
    >>> Task(TaskKind.BACKWARD_INPUT, 2, 0).cell
    '2I0'
    """

    kind: TaskKind
    stage: int
    microbatch: int

    @property
    def cell(self) -> str:
        """The short form used in grids and in CSV files: stage, letter, microbatch."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return f"{_PREFIX[self.kind]}_{self.stage}__{self.microbatch}"


@dataclass(frozen=True, slots=True, repr=False)
class FusedTask:
    """The last stage's forward and whole backward of one microbatch, run as one task.

    Nothing on another rank stands between the two, so compiling them together saves a dispatch and
    lets the compiler keep the residuals to itself.

    >>> FusedTask(Task(TaskKind.FORWARD, 3, 0), Task(TaskKind.BACKWARD, 3, 0))
    FusedTask(fwd_3__0, bwd_3__0)
    """

    forward: Task
    backward: Task

    @property
    def stage(self) -> int:
        return self.forward.stage

    @property
    def microbatch(self) -> int:
        return self.forward.microbatch

    @property
    def cell(self) -> str:
        return f"{self.forward.cell}+{self.backward.kind.value}"

    def __repr__(self) -> str:
        return f"FusedTask({self.forward!r}, {self.backward!r})"


AnyTask = Task | FusedTask
"""What a rank's list holds."""


def parts(task: AnyTask) -> tuple[Task, ...]:
    """The plain tasks inside ``task``, in order.

    >>> parts(fused(3, 0))
    (fwd_3__0, bwd_3__0)
    """
    return (task.forward, task.backward) if isinstance(task, FusedTask) else (task,)


def flatten(tasks: Iterable[AnyTask]) -> Iterator[Task]:
    """``tasks`` with each fused task replaced by its two parts."""
    for task in tasks:
        if isinstance(task, FusedTask):
            yield task.forward
            yield task.backward
        else:
            yield task


def forward(stage: int, microbatch: int) -> Task:
    return Task(TaskKind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Task:
    return Task(TaskKind.BACKWARD, stage, microbatch)


def backward_input(stage: int, microbatch: int) -> Task:
    return Task(TaskKind.BACKWARD_INPUT, stage, microbatch)


def backward_weight(stage: int, microbatch: int) -> Task:
    return Task(TaskKind.BACKWARD_WEIGHT, stage, microbatch)


def fused(stage: int, microbatch: int) -> FusedTask:
    return FusedTask(forward(stage, microbatch), backward(stage, microbatch))
