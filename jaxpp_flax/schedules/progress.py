"""Run a schedule's ranks with its data dependencies, in one pass.

The validation, the order of dispatch and the simulator use the one function here. Its time is linear in
the number of tasks, and it holds only the results that another task will still read. The function has the
table in :mod:`dependencies` written out; ``tests/schedules/test_dependencies.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxpp_flax.schedules.task import AnyTask, FusedTask, Task, TaskKind

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: its next task, the position of that task, and the task that it waits for."""

    rank: int
    position: int
    task: AnyTask
    awaits: Task


class Times(Protocol):
    """The time of each kind of task, by stage."""

    @property
    def forward(self) -> Sequence[float]: ...
    @property
    def backward(self) -> Sequence[float]: ...
    @property
    def backward_input(self) -> Sequence[float]: ...
    @property
    def backward_weight(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class EvenTimes:
    """Equal times for every stage; by default the usual 1 for ``F``, 2 for ``B``."""

    forward: Sequence[float]
    backward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]

    @classmethod
    def of(cls, num_stages: int, backward: float = 2.0) -> EvenTimes:
        ones = [1.0] * num_stages
        return cls(ones, [backward] * num_stages, ones, ones)


def advance(
    ranks: Iterable[Iterator[AnyTask]],
    num_stages: int,
    emit: Callable[[int, AnyTask, float, float], None] | None = None,
    *,
    times: Times | None = None,
    delay: Callable[[int, int, Task], float] | None = None,
) -> list[Blocked]:
    """Run every rank as far as possible, and return the blocked ranks.

    Args:
        ranks: each rank's tasks, in their order.
        num_stages: number of stages; the last stage's backward waits for no other stage.
        emit: called with ``(rank, task, start, end)`` once for each task. The order of calls is
            legal, and each rank's calls are in its own order; across ranks they are not by time.
        times: the time of each kind of task on each stage; by default :class:`EvenTimes`.
        delay: ``delay(source, target, task)``, the time that the result of ``task`` takes from
            rank to rank. Not called within a rank. None: no time.
    """
    iterators = [iter(tasks) for tasks in ranks]
    count = len(iterators)
    heads: list[AnyTask | None] = [None] * count
    positions = [-1] * count
    free = [0.0] * count
    missing: list[Task | None] = [None] * count
    # The results that are made and not yet read. A key is microbatch * num_stages + stage.
    activations: dict[int, tuple[float, int]] = {}  # F's output, for the next stage
    gradients: dict[int, tuple[float, int]] = {}  # the input gradient, for the stage before
    forwarded: set[int] = set()  # F has run here, and its backward has not
    split: set[int] = set()  # I has run here, and W has not
    # The rank that waits for a result; each result has only one reader.
    wait_activation: dict[int, int] = {}
    wait_gradient: dict[int, int] = {}
    last = num_stages - 1
    times = EvenTimes.of(num_stages) if times is None else times
    forward, backward = times.forward, times.backward
    backward_input, backward_weight = times.backward_input, times.backward_weight

    # One long loop on purpose: schedules may have tens of millions of tasks, and calls and attribute
    # look-ups would take most of the time.
    ready_ranks = list(range(count - 1, -1, -1))
    while ready_ranks:
        rank = ready_ranks.pop()
        iterator = iterators[rank]
        task = heads[rank]
        heads[rank] = None
        position = positions[rank]
        now = free[rank]
        while True:
            if task is None:
                task = next(iterator, None)
                if task is None:
                    break
                position += 1
            stage = task.stage
            m = task.microbatch
            key = m * num_stages + stage
            if isinstance(task, FusedTask):
                kind, is_fused = _F, True
            else:
                kind, is_fused = task.kind, False
            start = now
            awaits = None
            if kind is _F:
                if is_fused and stage != last:
                    awaits = Task(_B, stage + 1, m)
                elif stage:
                    made = activations.pop(key - 1, None)
                    if made is None:
                        wait_activation[key - 1] = rank
                        awaits = Task(_F, stage - 1, m)
                    else:
                        arrived, source = made
                        if delay is not None and source != rank:
                            arrived += delay(source, rank, Task(_F, stage - 1, m))
                        if arrived > start:
                            start = arrived
            elif kind is _W:
                if key in split:
                    split.discard(key)
                else:
                    awaits = Task(_I, stage, m)
            elif key not in forwarded:
                awaits = Task(_F, stage, m)
            else:
                if stage != last:
                    made = gradients.pop(key + 1, None)
                    if made is None:
                        wait_gradient[key + 1] = rank
                        awaits = Task(_B, stage + 1, m)
                    else:
                        arrived, source = made
                        if delay is not None and source != rank:
                            arrived += delay(source, rank, Task(_B, stage + 1, m))
                        if arrived > start:
                            start = arrived
                if awaits is None:
                    forwarded.discard(key)
            if awaits is not None:
                heads[rank], missing[rank] = task, awaits
                break
            waiter = None
            if kind is _F:
                if is_fused:
                    now = start + forward[stage] + backward[stage]
                    if stage:
                        gradients[key] = (now, rank)
                        waiter = wait_gradient.pop(key, None)
                else:
                    now = start + forward[stage]
                    forwarded.add(key)
                    if stage != last:
                        activations[key] = (now, rank)
                        waiter = wait_activation.pop(key, None)
            elif kind is _W:
                now = start + backward_weight[stage]
            else:
                if kind is _I:
                    now = start + backward_input[stage]
                    split.add(key)
                else:
                    now = start + backward[stage]
                if stage:
                    gradients[key] = (now, rank)
                    waiter = wait_gradient.pop(key, None)
            if emit is not None:
                emit(rank, task, start, now)
            if waiter is not None:
                ready_ranks.append(waiter)
            task = None
        free[rank] = now
        positions[rank] = position
    blocked: list[Blocked] = []
    for rank, (head, awaits) in enumerate(zip(heads, missing, strict=True)):
        if head is not None and awaits is not None:
            blocked.append(Blocked(rank, positions[rank], head, awaits))
    return blocked
