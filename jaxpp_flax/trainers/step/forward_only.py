"""The order of work for `evaluate` and `predict`, which have no backward."""

from __future__ import annotations

from jaxpp_flax.schedules import Schedule, Task, TaskKind

__all__ = ["ForwardOnly"]


class ForwardOnly(Schedule):
    """A schedule with only forwards, on the ranks of a training schedule, for any number of microbatches.

    Example:
      >>> from jaxpp_flax.schedules import ZBV
      >>> ForwardOnly(ZBV(4, 2)).tasks(1)
      [[fwd_0__0, fwd_3__0], [fwd_1__0, fwd_2__0]]
    """

    def __init__(self, training: Schedule) -> None:
        super().__init__(training.num_stages, training.num_ranks)
        object.__setattr__(self, "_home", tuple(training.rank_of(stage) for stage in range(training.num_stages)))

    _home: tuple[int, ...]

    def _check_ranks(self) -> None:
        """Accept all numbers: a user's own schedule may have more stages on one rank than on another."""

    def rank_of(self, stage: int) -> int:
        return self._home[stage]

    def tasks(self, num_microbatches: int) -> list[list[Task]]:  # type: ignore[override]
        return [
            [Task(TaskKind.FORWARD, stage, m) for stage in self.stages_of(rank) for m in range(num_microbatches)]
            for rank in range(self.num_ranks)
        ]
