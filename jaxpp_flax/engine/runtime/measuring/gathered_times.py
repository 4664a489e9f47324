"""The times of tasks, gathered from the processes that measured them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_flax.engine.runtime.measuring.profile import TaskTiming
from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["StepClock"]


@dataclass(frozen=True)
class StepClock:
    """The beginning of a measured step; all processes make one at the same point of their programs.

    Processes of one host share its clock. The clocks of several hosts are compared as they are: an error of them moves
    the tasks of one host against those of another, and changes no task's length.
    """

    group: ProcessGroup
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        self.group.exchange("the start of a measured step", b"", None)
        object.__setattr__(self, "begin", time.time())

    def gather(self, timings: Sequence[TaskTiming]) -> list[TaskTiming]:
        """Return the times of all ranks, the same in every process; of a rank of several processes, the first's."""
        mine = {"begin": self.begin, "timings": [_plain(timing) for timing in timings]}
        answers = exchange_values(self.group, "the times of a measured step", mine)
        first = min(answer["begin"] for answer in answers)
        found: dict[int, list[TaskTiming]] = {}
        for answer in answers:
            own: dict[int, list[TaskTiming]] = {}
            for listed in answer["timings"]:
                timing = _timing(*listed)
                later = answer["begin"] - first
                own.setdefault(timing.rank, []).append(
                    replace(timing, start=timing.start + later, end=timing.end + later)
                )
            found = {**own, **found}
        return [timing for rank in sorted(found) for timing in found[rank]]


def _plain(timing: TaskTiming) -> list[Any]:
    task = timing.task
    kinds = [of.kind.name for of in (task.forward, task.backward)] if isinstance(task, FusedTask) else [task.kind.name]
    return [timing.rank, kinds, task.stage, task.microbatch, timing.start, timing.end]


def _timing(rank: int, kinds: Sequence[str], stage: int, microbatch: int, start: float, end: float) -> TaskTiming:
    tasks = [Task(TaskKind[kind], stage, microbatch) for kind in kinds]
    return TaskTiming(rank=rank, task=tasks[0] if len(tasks) == 1 else FusedTask(*tasks), start=start, end=end)
