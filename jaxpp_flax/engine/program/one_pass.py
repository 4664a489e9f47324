"""The schedule of a function without a loop: each rank runs its stages forward, then backward."""

from __future__ import annotations

from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["OnePass"]


class OnePass(Schedule):
    """Runs each rank's stages forward, in order, then backward."""

    def tasks(self, num_microbatches: int) -> list[list[Task]]:
        def of(rank: int) -> list[Task]:
            stages = self.stages_of(rank)
            ordered = [(TaskKind.FORWARD, s) for s in stages] + [(TaskKind.BACKWARD, s) for s in reversed(stages)]
            return [Task(kind, stage, m) for kind, stage in ordered for m in range(num_microbatches)]

        return [of(rank) for rank in range(self.num_ranks)]

    def without_dead_stages(self, written: int, live: int) -> OnePass:
        """Return the schedule of the stages that have work.

        Args:
          written: the number of marks in the function.
          live: the number of marks that a result depends on. The stages behind the others do nothing.

        Example:
          >>> OnePass(4).without_dead_stages(written=4, live=1).num_stages
          2
          >>> OnePass(4).without_dead_stages(written=2, live=1).num_stages  # too few marks
          4
        """
        enough = live < self.num_stages - 1 <= written
        return _SomeStages(live + 1, self.num_ranks) if enough else self


class _SomeStages(OnePass):
    """The first stages of a function; ranks without a stage do nothing."""

    def _check_ranks(self) -> None: ...
