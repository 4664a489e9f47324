"""How far a process may run ahead of what it receives.

XLA's CPU client takes 32 computations for each device; the next one waits, and on a process with several devices it
then holds the very thread that would start those whose inputs arrive: measured, two processes that run ahead of each
other stand still for good. So a process waits for its oldest receive before that many tasks hang on it. As all
processes follow one global order, waiting at a receive can never be circular.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import jax

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.processes.failures import observe_broken_connection
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["Window"]

# Half of what XLA takes: tasks in flight may hang on more than one receive.
_MAX_TASKS_AHEAD = 16


class Window:
    """Counts the tasks dispatched since the oldest receive that has not arrived.

    Args:
      group: is told what is waited for, and knows whether it will ever come.
      max_tasks: dispatched since that receive, at most.
    """

    def __init__(self, group: ProcessGroup, max_tasks: int = _MAX_TASKS_AHEAD) -> None:
        self._group = group
        self._max = max_tasks
        self._tasks = 0
        self._pending: deque[tuple[Any, int, Parcel, Tag, int]] = deque()

    def received(self, array: Any, parcel: Parcel, tag: Tag) -> None:
        """A receive was started; `array` becomes ready when it ends, and is neither donated nor deleted till then."""
        self._pending.append((array, self._tasks, parcel, tag, self._group.runs))

    def before_task(self) -> None:
        """Called before each task; waits where too many are ahead.

        Raises:
          ProcessFailedError: if what is waited for will not come.
        """
        self._tasks += 1
        while self._pending:
            array, begun, parcel, tag, run = self._pending[0]
            ahead = self._tasks - begun > self._max
            if not ahead and (array.is_deleted() or not array.is_ready()):
                return
            if ahead and not array.is_deleted():
                self._wait(array, parcel, tag, run)
            self._pending.popleft()

    def _wait(self, array: Any, parcel: Parcel, tag: Tag, run: int) -> None:
        what = f"{parcel.what}, in step {tag.step}"
        try:
            with self._group.waiting(what, parcel.source, run):
                array.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            with self._group.waiting(what, on=parcel.source):
                observe_broken_connection(self._group, parcel.source, what, error)
                self._group.check(error)
