"""Why `fit` ends before its data does, and after which step: the same in all processes of a run."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Literal

from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["StopReason", "StopTogether"]

_STEPS_AHEAD = 4
"""More than any process is ahead of another one, since each waits for the loss of two steps ago."""


@dataclass(frozen=True)
class StopReason:
    """Why `fit` ends.

    Args:
      kind: "preempted" by SIGTERM, "interrupted" by Ctrl-C, or "stopped" by `trainer.stop`.
      text: what `stop` was given.
    """

    kind: Literal["preempted", "interrupted", "stopped"]
    text: str = ""


class StopTogether:
    """After which step all processes of a run stop, once one of them has been asked to.

    A pipeline cannot go on without one of its stages, and all must save the same step. The first process that is asked
    announces a step that none has reached, and why; each looks for that after every step.

    Args:
      group: the processes; each makes as many of these, in the same order.

    Example:
      >>> from jaxpp_flax.processes.group import ProcessGroup
      >>> stop = StopTogether(ProcessGroup(None, 0, 1))
      >>> stop.after(3, None), stop.after(4, StopReason("stopped", "enough"))
      (None, StopReason(kind='stopped', text='enough'))
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._name = group.values.numbered_name("the last step")
        self._last: tuple[int, StopReason] | None = None

    def after(self, step: int, requested: StopReason | None) -> StopReason | None:
        """Why no step comes after `step`; None if one does.

        Args:
          step: the last one that this process has begun.
          requested: why this process has been asked to stop, if it has.
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

    def agree(self, requested: StopReason | None) -> StopReason | None:
        """Where all processes come at the same time: what the first of them was asked that was asked anything.

        SIGTERM counts before Ctrl-C, and that before a decision of the program's own.
        """
        if self._group.process_count == 1:
            return requested
        mine = None if requested is None else astuple(requested)
        answers = exchange_values(self._group, "whether to stop", mine, timeout_s=None)
        reasons = [StopReason(*answer) for answer in answers if answer is not None]
        order = ("preempted", "interrupted", "stopped")
        return min(reasons, key=lambda reason: order.index(reason.kind), default=None)
