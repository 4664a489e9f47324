"""The end of a `fit` before its data ends: SIGTERM, Ctrl-C or `trainer.stop` end all processes after the same step."""

from __future__ import annotations

from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.trainers.ending.interruption import Interruption
from jaxpp_flax.trainers.ending.preemption import Preemption
from jaxpp_flax.trainers.ending.stopping import CommonStop, StopReason
from jaxpp_flax.trainers.loop.steps import StepRecord, TrainerProtocol

__all__ = ["Ending"]


class Ending:
    """Holds the reason of the loop's end, once the end is decided.

    Args:
      trainer: `stopping` has the reason that a callback gave.
      group: the processes that decide together.
      interruption, preemption: context managers that are entered around the loop.
    """

    def __init__(
        self, trainer: TrainerProtocol, group: ProcessGroup, interruption: Interruption, preemption: Preemption
    ) -> None:
        self._trainer, self._interruption, self._preemption = trainer, interruption, preemption
        self._common_stop = CommonStop(group)
        self.reason: StopReason | None = None

    def __call__(self, record: StepRecord) -> None:
        """After a step, look for a decision of any process."""
        if self.reason is None:
            self.reason = self._common_stop.after(self._trainer.step, self._requested())

    def decide_together(self) -> None:
        """Decide at once, at a point that all processes reach together: the decision of one holds for all."""
        if self.reason is None:
            self.reason = self._common_stop.decide(self._requested())

    def after_last_step(self) -> StopReason | None:
        """Return the reason, also if the data ended before the common step."""
        return self._common_stop.decide(self._requested() if self.reason is None else self.reason)

    def _requested(self) -> StopReason | None:
        """Return the reason if this process has been asked to end."""
        if self._preemption.requested:
            return StopReason("preempted")
        if self._interruption.requested:
            return StopReason("interrupted")
        stopping = self._trainer.stopping
        return None if stopping is None else StopReason("stopped", stopping)
