"""The simulated time of a step for the sizes of its stages, and the stages with the shortest step.

With one stage on each rank, the slowest rank sets the pace. With several (interleaved and V-shaped schedules), ranks
also wait for each other if their stages are uneven: loads do not give the time, and the simulated step decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.planning.stages.balancing import Sizes, balance, climb
from jaxpp_flax.schedules import Costs, Schedule, simulate

__all__ = ["MARGIN", "StepTime", "is_clearly_less"]

MARGIN = 0.1
"""The share of the step's time that balanced stages must save over even ones to be chosen unasked: what the estimate
promised of the slowest rank's time was up to 0.09 more than what was measured (`benchmarks/README.md`, "balance")."""

_MOST_TASKS = 60_000  # that all tries of a search simulate together: some tenths of a second


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The makespan of a step for the sizes of its stages, in the unit of the costs; transfers take no time.

    Args:
      schedule: the schedule of the tasks.
      num_microbatches: the number of microbatches of a step.
      forward: the forward cost of each block.
      backward: the backward cost of each block.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> step = StepTime(schedule=Std1F1B(2), num_microbatches=4, forward=[1, 1, 1], backward=[2, 2, 2])
      >>> step([2, 1]), step([1, 2])
      (25.0, 27.0)
      >>> step.balanced((2, 1))
      (2, 1)
    """

    schedule: Schedule
    num_microbatches: int
    forward: Sequence[float]
    backward: Sequence[float]

    def __call__(self, sizes: Sequence[int]) -> float:
        ends = list(itertools.accumulate(sizes, initial=0))
        forward, backward = (
            [float(sum(costs[start:end])) for start, end in itertools.pairwise(ends)]
            for costs in (self.forward, self.backward)
        )
        half = [cost / 2 for cost in backward]  # a split backward has one contraction in each part
        costs = Costs(forward=forward, backward_input=half, backward_weight=half)
        return simulate(self.schedule, costs, num_microbatches=self.num_microbatches).makespan

    def balanced(self, even: Sizes, sent: Sequence[float] | None = None) -> Sizes:
        """Return the stages with the fastest slowest rank; with several stages on a rank, those with a short step.

        There, the better one of `even` and of stages of equal cost is improved block by block.

        Args:
          even: sizes to improve.
          sent: bytes that cross a cut before each block (the first is not used).
        """
        costs = [ahead + back for ahead, back in zip(self.forward, self.backward, strict=True)]
        sizes = balance(costs, self.schedule.num_stages, sent)
        if self.schedule.num_stages == self.schedule.num_ranks:
            return sizes
        tries = _MOST_TASKS // (2 * self.schedule.num_stages * self.num_microbatches)
        return climb(min(even, sizes, key=self), self, tries)


def is_clearly_less(balanced: float, even: float) -> bool:
    """Return whether a cost with balanced stages is less than the cost with even ones by the margin.

    Example:
      >>> is_clearly_less(89.0, 100.0), is_clearly_less(91.0, 100.0), is_clearly_less(0.0, 0.0)
      (True, False, False)
    """
    return balanced < (1.0 - MARGIN) * even
