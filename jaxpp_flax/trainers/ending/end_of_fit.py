"""Whether a `fit` ends before its data does: by SIGTERM, Ctrl-C or `trainer.stop`, in all processes after one step."""

from __future__ import annotations

from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.trainers.ending.interruption import Interruption
from jaxpp_flax.trainers.ending.preemption import Preemption
from jaxpp_flax.trainers.ending.stopping import CommonStop, StopReason
from jaxpp_flax.trainers.loop.steps import StepRecord, TrainerProtocol

__all__ = ["Ending"]


class Ending:
    """Knows why the loop ends, once that is decided.

    Args:
      trainer: its `stopping` says what a callback has asked for.
      group: the processes that decide together.
      interruption, preemption: entered around the loop.
    """

    def __init__(
        self, trainer: TrainerProtocol, group: ProcessGroup, interruption: Interruption, preemption: Preemption
    ) -> None:
        self._trainer, self._interruption, self._preemption = trainer, interruption, preemption
        self._common_stop = CommonStop(group)
        self.reason: StopReason | None = None

    def __call__(self, record: StepRecord) -> None:
        """After a step: look for what any process has decided."""
        if self.reason is None:
            self.reason = self._common_stop.after(self._trainer.step, self._requested())

    def decide_together(self) -> None:
        """Where all processes come at the same time, what one of them has decided holds for all, at once."""
        if self.reason is None:
            self.reason = self._common_stop.decide(self._requested())

    def after_last_step(self) -> StopReason | None:
        """The reason, also where the data have ended before the step that was agreed on."""
        return self._common_stop.decide(self._requested() if self.reason is None else self.reason)

    def _requested(self) -> StopReason | None:
        """Why this process has been asked to end."""
        if self._preemption.requested:
            return StopReason("preempted")
        if self._interruption.requested:
            return StopReason("interrupted")
        stopping = self._trainer.stopping
        return None if stopping is None else StopReason("stopped", stopping)
