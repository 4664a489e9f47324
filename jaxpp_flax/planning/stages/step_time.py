"""The simulated time of a step under an assignment, and the choice between even and balanced stages.

With several stages on a rank, loads do not give the time. Even stages of identical blocks are identical: they share one
lowering and one compilation. So balanced ones must save a clear share of the step, more than the estimate's error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpp_flax.schedules import Costs, Schedule, simulate

__all__ = ["MARGIN", "MOST_TASKS", "StepTime", "is_clearly_less"]

MARGIN = 0.05
"""The share of the step's time that balanced stages must save over even ones to be chosen."""

MOST_TASKS = 300_000
"""The number of tasks that all tries of a search simulate together, if a user asks for it: about half a second."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The makespan of a step for the sizes of its stages, in the unit of the costs; transfers take no time.

    Args:
      schedule: the schedule of the tasks.
      num_microbatches: the number of microbatches of a step.
      forward: the forward cost of each block.
      backward: the backward cost of each block.
      most_tasks: the number of tasks that all tries of a search simulate together.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> step = StepTime(schedule=Std1F1B(2), num_microbatches=4, forward=[1, 1, 1], backward=[2, 2, 2])
      >>> step([2, 1]), step([1, 2])
      (25.0, 27.0)
      >>> step.with_equal_stages()
      22.5
    """

    schedule: Schedule
    num_microbatches: int
    forward: Sequence[float]
    backward: Sequence[float]
    most_tasks: int = MOST_TASKS

    def __call__(self, sizes: Sequence[int]) -> float:
        forward, backward = (
            [after[end] - after[end - size] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
            for after in self._running
        )
        return self._makespan(forward, backward)

    def with_equal_stages(self) -> float:
        """Return the makespan of a step with the same work in stages of equal cost, as if blocks could be divided."""
        stages = self.schedule.num_stages
        forward, backward = ([after[-1] / stages] * stages for after in self._running)
        return self._makespan(forward, backward)

    def _makespan(self, forward: Sequence[float], backward: Sequence[float]) -> float:
        half = [cost / 2 for cost in backward]  # a split backward has one contraction in each part
        costs = Costs(forward=forward, backward_input=half, backward_weight=half)
        return simulate(self.schedule, costs, num_microbatches=self.num_microbatches).makespan

    @property
    def tries(self) -> int:
        """The number of assignments that can be tried in reasonable time."""
        return self.most_tasks // (2 * self.schedule.num_stages * self.num_microbatches)

    @cached_property
    def _running(self) -> tuple[list[float], list[float]]:
        return [0.0, *itertools.accumulate(self.forward)], [0.0, *itertools.accumulate(self.backward)]


def is_clearly_less(balanced: float, even: float) -> bool:
    """Return whether a cost with balanced stages is less than the cost with even ones by the margin.

    Example:
      >>> is_clearly_less(90.0, 100.0), is_clearly_less(96.0, 100.0), is_clearly_less(0.0, 0.0)
      (True, False, False)
    """
    return balanced < (1.0 - MARGIN) * even
