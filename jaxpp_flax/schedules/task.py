"""The unit of work of a schedule: one pass of one stage over one microbatch; and the table of what each kind means.

For stage ``s`` and microbatch ``m``:

- ``F(s, m)`` reads the activation that ``F(s-1, m)`` makes;
- ``B(s, m)`` and ``I(s, m)`` read the activations of ``F(s, m)`` and the gradient that ``B(s+1, m)`` or
  ``I(s+1, m)`` makes;
- ``W(s, m)`` reads the values that ``I(s, m)`` keeps.

The simulator, the validation, the walk of memory and the drawings read the table :data:`MEANING`.
"""

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


@dataclass(frozen=True, slots=True)
class Dependency:
    """A result that a task reads.

    Attributes:
        makers: the kinds of task that can make the result. The first kind names the result.
        stage: the maker's stage, relative to the reader's stage.
    """

    makers: tuple[TaskKind, ...]
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the tasks of one kind do.

    The bytes of a microbatch have names: see :class:`memory.StageBytes`.

    Attributes:
        name: the kind, in words.
        prefix: the kind in the name of a task.
        reads: the results that a task reads. No stage comes before the first one or after the last one.
        excludes: the kinds that may not have run for the same stage and microbatch.
        takes: the bytes that a task takes when it starts.
        frees: the bytes that it frees when it ends.
        leaves: the bytes that it leaves behind when it ends.
    """

    name: str
    prefix: str
    reads: tuple[Dependency, ...]
    excludes: tuple[TaskKind, ...]
    takes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


_F, _B, _I, _W = TaskKind
_FOR_A_GRADIENT = Dependency((_F,), 0), Dependency((_B, _I), 1)

MEANING: dict[TaskKind, Meaning] = {
    _F: Meaning(name="forward", prefix="fwd", reads=(Dependency((_F,), -1),), excludes=(_F,), takes=("saved",)),
    _B: Meaning(
        name="backward", prefix="bwd", reads=_FOR_A_GRADIENT, excludes=(_B, _I, _W),
        takes=("recomputed",), frees=("saved", "recomputed"),
    ),
    _I: Meaning(
        name="input gradient", prefix="bwd_i", reads=_FOR_A_GRADIENT, excludes=(_I, _B),
        takes=("recomputed",), frees=("saved", "recomputed"), leaves=("kept",),
    ),
    _W: Meaning(
        name="weight gradient", prefix="bwd_w", reads=(Dependency((_I,), 0),), excludes=(_W, _B), frees=("kept",)
    ),
}  # fmt: skip


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
        return f"{MEANING[self.kind].prefix}_{self.stage}__{self.microbatch}"


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
    """Iterate over ``tasks``, with each fused task replaced by its two parts."""
    return (part for task in tasks for part in parts(task))


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


_RESULTS = {
    kind: tuple(
        dict.fromkeys((kind, *(d.makers[0] for meaning in MEANING.values() for d in meaning.reads if kind in d.makers)))
    )
    for kind in TaskKind
}


def needs(task: AnyTask, num_stages: int) -> list[Task]:
    """Return the tasks whose results ``task`` reads. The maker of a gradient has the name of its whole form, ``B``.

    >>> needs(backward(1, 5), num_stages=4)
    [fwd_1__5, bwd_2__5]
    >>> needs(backward_weight(1, 5), num_stages=4), needs(fused(3, 5), num_stages=4)
    ([bwd_i_1__5], [fwd_2__5])
    """
    if isinstance(task, FusedTask):
        return [need for part in parts(task) for need in needs(part, num_stages) if need not in parts(task)]
    stage, m = task.stage, task.microbatch
    return [
        Task(read.makers[0], stage + read.stage, m)
        for read in MEANING[task.kind].reads
        if 0 <= stage + read.stage < num_stages
    ]


def results(task: AnyTask) -> list[Task]:
    """Return the names of the results of ``task``, as :func:`needs` uses them.

    >>> results(backward_input(2, 0))
    [bwd_i_2__0, bwd_2__0]
    """
    return [Task(name, part.stage, part.microbatch) for part in parts(task) for name in _RESULTS[part.kind]]
