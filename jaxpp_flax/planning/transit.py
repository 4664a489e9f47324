"""The arrays that stages hand to one another: how many bytes of them wait on a rank while it runs another task."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import AnyTask, Task, TaskKind, parts

__all__ = ["waiting_bytes"]


def waiting_bytes(ranks: Sequence[Sequence[AnyTask]], sent: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Return, for each rank and each of its tasks, the bytes of arrays of other stages there: before, and beside it.

    An array is on its reader's rank from its maker's dispatch on. A backward reads a gradient beside its residuals, so
    this counts for the backward too; a forward keeps its input as a residual, which is counted as such.

    Args:
      ranks: each rank's tasks.
      sent: the bytes that each stage sends to the next one, and gets back as a gradient.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> waiting_bytes(Std1F1B(2).tasks(3), [8.0, 0.0])  # rank 0 runs F0 F1 B0 F2 B1 B2
      [[(0.0, 0.0), (0.0, 0.0), (8.0, 8.0), (8.0, 8.0), (8.0, 8.0), (8.0, 8.0)], [(16.0, 8.0), (8.0, 0.0), (8.0, 0.0)]]
    """
    before, beside = ([[0.0] * len(tasks) for tasks in ranks] for _ in range(2))
    if not any(sent):
        return [list(zip(*pair, strict=True)) for pair in zip(before, beside, strict=True)]
    numbers: list[list[int]] = [[] for _ in ranks]  # of each rank's tasks in the order of dispatch
    made: list[tuple[int, Task]] = []
    read: dict[tuple[bool, int, int], tuple[int, int]] = {}  # by direction, stage and microbatch: rank and position
    for number, (rank, task) in enumerate(merge_order([list(tasks) for tasks in ranks])):
        for part in parts(task):
            if part.kind is not TaskKind.BACKWARD_WEIGHT:
                made.append((number, part))
                read[part.kind is TaskKind.FORWARD, part.stage, part.microbatch] = rank, len(numbers[rank])
        numbers[rank].append(number)
    for number, task in made:
        is_forward = task.kind is TaskKind.FORWARD
        reader = read.get((is_forward, task.stage + (1 if is_forward else -1), task.microbatch))
        if reader is not None:
            rank, position = reader
            nbytes = sent[task.stage if is_forward else task.stage - 1]
            for at in range(bisect_right(numbers[rank], number), position + 1):
                before[rank][at] += nbytes
                beside[rank][at] += nbytes if at < position or not is_forward else 0.0
    return [list(zip(*pair, strict=True)) for pair in zip(before, beside, strict=True)]
