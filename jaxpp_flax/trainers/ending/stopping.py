"""The early end of `fit`: SIGTERM, Ctrl-C or `trainer.stop` end all processes of a run after the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Literal

from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.ending.interruption import STEPS_AHEAD, Interruption
from jaxpp_flax.trainers.ending.preemption import Preemption
from jaxpp_flax.trainers.loop.hooks import StepRecord, TrainerProtocol

__all__ = ["CommonStop", "Ending", "StopReason"]


@dataclass(frozen=True)
class StopReason:
    """The reason for the end of `fit`.

    Args:
      kind: "preempted" by SIGTERM, "interrupted" by Ctrl-C, or "stopped" by `trainer.stop`.
      text: the reason given to `stop`.
    """

    kind: Literal["preempted", "interrupted", "stopped"]
    text: str = ""


class CommonStop:
    """The last step of all processes of a run, once one of them has been asked to stop.

    A pipeline cannot go on without one of its stages, and all processes must save the same step. The first process that
    is asked to stop announces a step that no process has reached, with the reason. Each process reads the announcement
    after every step.

    Args:
      group: the processes; all of them make these objects in the same order.

    Example:
      >>> from jaxpp_flax.processes.group import ProcessGroup
      >>> stop = CommonStop(ProcessGroup(None, 0, 1))
      >>> stop.after(3, None), stop.after(4, StopReason("stopped", "enough"))
      (None, StopReason(kind='stopped', text='enough'))
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._name = group.values.numbered_name("the last step")
        self._last: tuple[int, StopReason] | None = None

    def after(self, step: int, requested: StopReason | None) -> StopReason | None:
        """Return the reason if `step`, which this process has begun, is the last one; None if another step follows.

        `requested` is the reason why this process has been asked to stop, if it has.
        """
        if self._group.process_count == 1:
            return requested
        if self._last is None:
            if requested is not None:
                announcement = [step + STEPS_AHEAD, *astuple(requested)]
                self._group.values.announce(self._name, json.dumps(announcement).encode())
            announced = self._group.values.announcement(self._name)
            if announced is not None:
                last, kind, text = json.loads(announced)
                self._last = (last, StopReason(kind, text))
        return self._last[1] if self._last is not None and step >= self._last[0] else None

    def decide(self, requested: StopReason | None) -> StopReason | None:
        """Return the common reason to stop, at a point where all processes meet; None if no process must stop.

        SIGTERM counts before Ctrl-C, and Ctrl-C before the program's own decision.
        """
        if self._group.process_count == 1:
            return requested
        mine = None if requested is None else astuple(requested)
        answers = exchange_values(self._group, "whether to stop", mine, timeout_s=None)
        reasons = [StopReason(*answer) for answer in answers if answer is not None]
        order = ("preempted", "interrupted", "stopped")
        return min(reasons, key=lambda reason: order.index(reason.kind), default=None)


class Ending(Callback):
    """A hook that looks for the end after each step, and a callback that decides after each evaluation."""

    def __init__(
        self, trainer: TrainerProtocol, group: ProcessGroup, interruption: Interruption, preemption: Preemption
    ) -> None:
        super().__init__()
        self._trainer, self._interruption, self._preemption = trainer, interruption, preemption
        self._common_stop = CommonStop(group)
        self.reason: StopReason | None = None
        """The reason of the loop's end, once the end is decided."""

    def __call__(self, record: StepRecord) -> None:
        """After a step, look for a decision of any process."""
        if self.reason is None:
            self.reason = self._common_stop.after(record.step, self._requested())

    def decide_together(self) -> None:
        """Decide at once, at a point that all processes reach together: the decision of one holds for all."""
        if self.reason is None:
            self.reason = self._common_stop.decide(self._requested())

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Decide: all processes have evaluated."""
        self.decide_together()

    def after_last_step(self) -> StopReason | None:
        """Return the reason, also if the data ended before the common step."""
        return self._common_stop.decide(self._requested() if self.reason is None else self.reason)

    def _requested(self) -> StopReason | None:
        if self._preemption.requested:
            return StopReason("preempted")
        if self._interruption.requested:
            return StopReason("interrupted")
        stopping = self._trainer.stopping
        return None if stopping is None else StopReason("stopped", stopping)
