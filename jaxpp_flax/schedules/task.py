"""The unit of work of a schedule: one pass of one stage over one microbatch; and the table of what each kind means.

For stage ``s`` and microbatch ``m``:

- ``F(s, m)`` reads the activation that ``F(s-1, m)`` makes;
- ``B(s, m)`` and ``I(s, m)`` read the activations of ``F(s, m)`` and the gradient that ``B(s+1, m)`` or
  ``I(s+1, m)`` makes;
- ``W(s, m)`` reads the values that ``I(s, m)`` keeps;
- the fused task of the last stage is its ``F`` and its ``B`` in one.

The simulator, the validation, the walk of memory and the drawings read the table :data:`MEANING`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from jaxpp_flax.schedules.errors import ScheduleError


class TaskKind(enum.Enum):
    """The kind of work of a task. The value is the letter in grids and CSV files.

    ``BACKWARD`` computes the gradients of a stage's input and of its weights. A schedule that
    splits the backward pass (zero bubble) runs ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT`` instead:
    the previous stage waits only for the first one, so the second one may fill a bubble.

    ``FUSED`` is the last stage's forward and whole backward as one task. No task of another rank comes
    between the two. So compiling them together saves a dispatch, and the residuals stay inside the
    compiled task.

    >>> TaskKind("I")
    <TaskKind.BACKWARD_INPUT: 'I'>
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    FUSED = "F+B"

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
        parts: the kinds that a fused task runs, in order.
        takes: the bytes that a task takes when it starts.
        frees: the bytes that it frees when it ends.
        leaves: the bytes that it leaves behind when it ends.
    """

    name: str
    prefix: str
    reads: tuple[Dependency, ...]
    excludes: tuple[TaskKind, ...]
    parts: tuple[TaskKind, ...] = ()
    takes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


_F, _B, _I, _W, _FUSED = TaskKind
RUN_FORWARD = (_F, _FUSED)
"""The kinds whose tasks run a stage's forward, and make its activation."""

_GRADIENT = _B, _I, _FUSED
_FOR_A_GRADIENT = Dependency(RUN_FORWARD, 0), Dependency(_GRADIENT, 1)

MEANING: dict[TaskKind, Meaning] = {
    _F: Meaning(name="forward", prefix="fwd", reads=(Dependency(RUN_FORWARD, -1),), excludes=(_F,), takes=("saved",)),
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
    _FUSED: Meaning(
        name="forward and backward", prefix="fwd_bwd", reads=(Dependency(RUN_FORWARD, -1), Dependency(_GRADIENT, 1)),
        excludes=(_F, _B, _I, _W), parts=(_F, _B), takes=("activation", "region"), frees=("activation", "region"),
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
        letter = self.kind.value
        return f"{self.stage}{letter[0]}{self.microbatch}{letter[1:]}"

    def __repr__(self) -> str:
        if self.kind is _FUSED:
            return f"FusedTask({', '.join(map(repr, parts(self)))})"
        return f"{MEANING[self.kind].prefix}_{self.stage}__{self.microbatch}"


def parts(task: Task) -> tuple[Task, ...]:
    """Return the plain tasks inside ``task``, in order.

    >>> parts(fused(3, 0))
    (fwd_3__0, bwd_3__0)
    """
    kinds = MEANING[task.kind].parts
    return tuple(Task(kind, task.stage, task.microbatch) for kind in kinds) if kinds else (task,)


def flatten(tasks: Iterable[Task]) -> Iterator[Task]:
    """Iterate over ``tasks``, with each fused task replaced by its two parts."""
    return (part for task in tasks for part in parts(task))


forward, backward, backward_input, backward_weight, fused = (partial(Task, kind) for kind in TaskKind)


def FusedTask(forward: Task, backward: Task) -> Task:  # noqa: N802  # the name of what it prints as
    """Return the last stage's forward and whole backward of one microbatch as one task.

    Raises:
        ScheduleError: if the two are not the forward and the whole backward of one stage and microbatch.

    >>> FusedTask(Task(TaskKind.FORWARD, 3, 0), Task(TaskKind.BACKWARD, 3, 0))
    FusedTask(fwd_3__0, bwd_3__0)
    """
    task = fused(forward.stage, forward.microbatch)
    if parts(task) != (forward, backward):
        raise ScheduleError(
            f"a fused task is the forward and the whole backward of one microbatch, got {forward!r} and {backward!r}"
        )
    return task


_RESULTS = {
    kind: tuple(
        dict.fromkeys((kind, *(d.makers[0] for meaning in MEANING.values() for d in meaning.reads if kind in d.makers)))
    )
    for kind in TaskKind
}


def needs(task: Task, num_stages: int) -> list[Task]:
    """Return the tasks whose results ``task`` reads. The maker of a gradient has the name of its whole form, ``B``.

    >>> needs(backward(1, 5), num_stages=4)
    [fwd_1__5, bwd_2__5]
    >>> needs(backward_weight(1, 5), num_stages=4), needs(fused(3, 5), num_stages=4)
    ([bwd_i_1__5], [fwd_2__5])
    """
    stage, m = task.stage, task.microbatch
    return [
        Task(read.makers[0], stage + read.stage, m)
        for read in MEANING[task.kind].reads
        if 0 <= stage + read.stage < num_stages
    ]


def results(task: Task) -> list[Task]:
    """Return the names of the results of ``task``, as :func:`needs` uses them.

    >>> results(backward_input(2, 0))
    [bwd_i_2__0, bwd_2__0]
    """
    return [Task(name, task.stage, task.microbatch) for name in _RESULTS[task.kind]]
