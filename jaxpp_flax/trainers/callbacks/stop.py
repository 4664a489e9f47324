"""The callback that ends a loop early: SIGTERM, Ctrl-C or `trainer.stop`, in all processes after the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Literal

from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord
from jaxpp_flax.trainers.callbacks.ctrl_c import STEPS_AHEAD, Interruption
from jaxpp_flax.trainers.callbacks.sigterm import PREEMPTED_STATUS, Preemption

__all__ = ["CommonStop", "Stop", "StopReason"]


@dataclass(frozen=True)
class StopReason:
    """The reason for the early end of a loop.

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


class Stop(Callback):
    """Looks for a request after each step; decides at once where all processes meet: at evaluations and at the end.

    Args:
      group: the processes that end the loop together.
    """

    def __init__(self, group: ProcessGroup, interruption: Interruption, preemption: Preemption) -> None:
        super().__init__()
        self.is_alone = group.process_count == 1
        self.interruption, self.preemption = interruption, preemption
        self._common_stop = CommonStop(group)
        self.reason: StopReason | None = None
        """The reason of the loop's end, once the end is decided."""

    def on_fit_start(self, trainer: Any) -> None:
        self._decide(trainer)

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        if self.reason is None:
            self.reason = self._common_stop.after(record.step, self._requested(trainer))

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self._decide(trainer)

    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        """Decide also where the data ended before the common step, and for requests since that step."""
        if error is None:
            self.reason = self._common_stop.decide(self._requested(trainer)) or self.reason
            self.raise_decided()

    @property
    def is_preempted(self) -> bool:
        """True if SIGTERM ends the loop; a single process needs no decision for it."""
        return (self.is_alone and self.preemption.requested) or self._kind == "preempted"

    @property
    def is_interrupted(self) -> bool:
        """True if all processes have decided to end after Ctrl-C."""
        return self._kind == "interrupted"

    @property
    def _kind(self) -> str | None:
        return None if self.reason is None else self.reason.kind

    def raise_decided(self) -> None:
        """Raise what ends all processes: Ctrl-C, or the exit after SIGTERM."""
        if self._kind == "preempted":
            raise SystemExit(PREEMPTED_STATUS)
        if self._kind == "interrupted":
            raise KeyboardInterrupt

    def _decide(self, trainer: Any) -> None:
        if self.reason is None:
            self.reason = self._common_stop.decide(self._requested(trainer))

    def _requested(self, trainer: Any) -> StopReason | None:
        if self.preemption.requested:
            return StopReason("preempted")
        if self.interruption.requested:
            return StopReason("interrupted")
        return None if trainer.stopping is None else StopReason("stopped", trainer.stopping)
