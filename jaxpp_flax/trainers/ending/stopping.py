"""The early end of `fit`: its reason and its last step, the same in all processes of a run."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Literal

from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["StopReason", "CommonStop"]

_STEPS_AHEAD = 4
"""A process is fewer steps than this ahead of another one, since each waits for the loss of two steps ago."""


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
        """Return the reason if `step` is the last step; None if another step follows.

        Args:
          step: the last step that this process has begun.
          requested: the reason why this process has been asked to stop; None if it has not.
        """
        if self._group.process_count == 1:
            return requested
        if self._last is None:
            if requested is not None:
                announcement = [step + _STEPS_AHEAD, *astuple(requested)]
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
