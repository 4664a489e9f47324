"""The unit of work of a schedule: one pass of one stage over one microbatch."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class TaskKind(enum.Enum):
    """The kind of work of a task. The value is the letter in grids and CSV files.

    ``BACKWARD`` computes the gradients of a stage's input and of its weights. A schedule that
    splits the backward pass (zero bubble) runs ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT`` instead:
    the previous stage waits only for the first one, so the second one may fill a bubble.

    >>> TaskKind("I")
    <TaskKind.BACKWARD_INPUT: 'I'>
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    __hash__ = object.__hash__  # enum's own is a Python function: tables by kind are read once for each task


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
        """The short form in grids and in CSV files: stage, letter, microbatch."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return f"{_PREFIX[self.kind]}_{self.stage}__{self.microbatch}"


@dataclass(frozen=True, slots=True, repr=False)
class FusedTask:
    """The last stage's forward and whole backward of one microbatch, as one task.

    No task of another rank comes between the two. So compiling them together saves a dispatch, and
    the residuals stay inside the compiled task.

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
"""An element of a rank's list of tasks."""


def parts(task: AnyTask) -> tuple[Task, ...]:
    """Return the plain tasks inside ``task``, in order.

    >>> parts(fused(3, 0))
    (fwd_3__0, bwd_3__0)
    """
    return (task.forward, task.backward) if isinstance(task, FusedTask) else (task,)


def flatten(tasks: Iterable[AnyTask]) -> Iterator[Task]:
    """Yield ``tasks``, with each fused task replaced by its two parts."""
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
