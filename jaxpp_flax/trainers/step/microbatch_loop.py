"""The loop over the microbatches of a step: their number, and the schedule of its tasks; loops without gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpp_flax.schedules import Schedule, Task, TaskKind

__all__ = ["ForwardOnly", "MicrobatchLoop", "with_schedule"]


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoop:
    """The number of microbatches of a loop, the schedule of its tasks, and the microbatches of the step before it."""

    num_microbatches: int
    schedule: Schedule | None
    before: Any = None

    def number(self, index: Any) -> Any:
        """Return the number of a microbatch in its step: random keys depend on it."""
        return index if self.before is None else self.before + index


class ForwardOnly(Schedule):
    """A schedule with only forwards, on the ranks of a training schedule, for any number of microbatches.

    A loop with gradients by its inputs (a force field) has backward work too: see `with_backward`.

    Example:
      >>> from jaxpp_flax.schedules import ZBV
      >>> ForwardOnly(ZBV(4, 2)).tasks(1)
      [[fwd_0__0, fwd_3__0], [fwd_1__0, fwd_2__0]]
      >>> ForwardOnly(ZBV(4, 2)).with_backward().tasks(1)[0]
      [fwd_0__0, fwd_3__0, bwd_3__0, bwd_0__0]
    """

    def __init__(self, training: Schedule) -> None:
        super().__init__(training.num_stages, training.num_ranks)
        vars(self).update(_home=tuple(map(training.rank_of, range(training.num_stages))))

    _home: tuple[int, ...]

    def _check_ranks(self) -> None:
        """Accept all numbers: a user's own schedule may have more stages on one rank than on another."""

    def rank_of(self, stage: int) -> int:
        return self._home[stage]

    def with_backward(self) -> Schedule:
        return _ForwardAndBackward(self)

    def tasks(self, num_microbatches: int) -> list[list[Task]]:  # type: ignore[override]
        return [
            [Task(TaskKind.FORWARD, stage, m) for stage in self.stages_of(rank) for m in range(num_microbatches)]
            for rank in range(self.num_ranks)
        ]


class _ForwardAndBackward(ForwardOnly):
    """Runs the microbatches in groups, each forward and then backward through all stages.

    A group has as many microbatches as there are stages: no stage keeps the residuals of more, as in 1F1B.
    """

    def with_backward(self) -> Schedule:
        return self

    def tasks(self, num_microbatches: int) -> list[list[Task]]:  # type: ignore[override]
        count = self.num_stages
        groups = [range(m, min(m + count, num_microbatches)) for m in range(0, num_microbatches, count)]

        def of(rank: int) -> list[Task]:
            stages = self.stages_of(rank)
            ordered = [(TaskKind.FORWARD, s) for s in stages] + [(TaskKind.BACKWARD, s) for s in reversed(stages)]
            return [Task(kind, stage, m) for group in groups for kind, stage in ordered for m in group]

        return [of(rank) for rank in range(self.num_ranks)]


def with_schedule(own: Schedule, of: Schedule) -> Schedule:
    """Return what stands in the place of a loop's own schedule if the step is trained by another."""
    return ForwardOnly(of) if isinstance(own, ForwardOnly) else of
