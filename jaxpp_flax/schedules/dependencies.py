"""The data dependencies between tasks: one table that defines the meaning of every loop over a schedule.

For stage ``s`` and microbatch ``m``:

- ``F(s, m)`` reads the activation that ``F(s-1, m)`` makes;
- ``B(s, m)`` and ``I(s, m)`` read the activations of ``F(s, m)`` and the gradient that ``B(s+1, m)`` or
  ``I(s+1, m)`` makes;
- ``W(s, m)`` reads the values that ``I(s, m)`` keeps.

The simulator, the validation and the search read this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_flax.schedules.task import AnyTask, FusedTask, Task, TaskKind, parts

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class Dependency:
    """A result that a task reads.

    Attributes:
        makers: the kinds of task that can make the result. The first kind names the result.
        stage: the maker's stage, relative to the reader's stage.
    """

    makers: tuple[TaskKind, ...]
    stage: int


DEPENDENCIES: dict[TaskKind, tuple[Dependency, ...]] = {
    _F: (Dependency((_F,), -1),),
    _B: (Dependency((_F,), 0), Dependency((_B, _I), 1)),
    _I: (Dependency((_F,), 0), Dependency((_B, _I), 1)),
    _W: (Dependency((_I,), 0),),
}
"""The results that each kind of task reads. No stage comes before the first one or after the last one."""

_NAMES = {
    kind: tuple(
        dict.fromkeys((kind, *(d.makers[0] for reads in DEPENDENCIES.values() for d in reads if kind in d.makers)))
    )
    for kind in TaskKind
}


def needs(task: AnyTask, num_stages: int) -> list[Task]:
    """Return the tasks whose results ``task`` reads. The maker of a gradient has the name of its whole form, ``B``.

    >>> from jaxpp_flax.schedules.task import backward, backward_weight, fused
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
        for read in DEPENDENCIES[task.kind]
        if 0 <= stage + read.stage < num_stages
    ]


def results(task: AnyTask) -> list[Task]:
    """Return the names of the results of ``task``, as :func:`needs` uses them.

    >>> from jaxpp_flax.schedules.task import backward_input
    >>> results(backward_input(2, 0))
    [bwd_i_2__0, bwd_2__0]
    """
    return [Task(name, part.stage, part.microbatch) for part in parts(task) for name in _NAMES[part.kind]]
