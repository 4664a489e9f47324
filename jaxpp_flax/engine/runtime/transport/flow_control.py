"""A limit on the tasks that a process starts ahead of its receives.

XLA's clients queue 32 computations for each device, and the next one waits. In a process with several devices, that
wait blocks the thread that would start the computations whose inputs have arrived. Measured on CPU: two processes that
run ahead of each other then hang forever. (XLA gives the clients of GPUs and TPUs the same limit.) So a process waits
for its oldest receive before that many tasks depend on it. All processes follow one global order, so waits at receives
are never circular.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import ReferenceType, ref

import jax

from jaxpp_flax.engine.program.waits import IN_FLIGHT
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.processes.failures import observe_broken_connection
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["Window"]

# Half of XLA's limit: tasks in flight may depend on more than one receive.
_MAX_TASKS_AHEAD = IN_FLIGHT // 2


class Window:
    """Counts the tasks dispatched since the oldest receive that has not arrived, and waits at `max_tasks`."""

    def __init__(self, group: ProcessGroup, max_tasks: int = _MAX_TASKS_AHEAD) -> None:
        self._group = group
        self._max = max_tasks
        self._tasks = 0
        self._pending: deque[tuple[ReferenceType[Any], int, Parcel, Tag, int]] = deque()

    def received(self, array: Any, parcel: Parcel, tag: Tag) -> None:
        """Note a new receive; `array` becomes ready when it ends, and is neither donated nor deleted until then.

        The watchdog holds it until it has arrived. A reference here would hold it until the next step.
        """
        self._pending.append((ref(array), self._tasks, parcel, tag, self._group.runs))

    def before_task(self) -> None:
        """Count a task, and wait if too many are ahead; called before each task.

        Raises:
          ProcessFailedError: if the awaited array will not come.
        """
        self._tasks += 1
        while self._pending:
            reference, begun, parcel, tag, run = self._pending[0]
            if (array := reference()) is not None:  # else it has arrived
                ahead = self._tasks - begun > self._max
                if not ahead and (array.is_deleted() or not array.is_ready()):
                    return
                if ahead and not array.is_deleted():
                    self.wait(array, parcel, tag, run)
            self._pending.popleft()

    def wait(self, array: Any, parcel: Parcel, tag: Tag, run: int) -> None:
        """Wait for a received array of a run, and name it meanwhile.

        Raises:
          ProcessFailedError: if the array will not come.
        """
        what = tag.awaited
        with self._group.waiting(what, parcel.source, run, tag.number):
            try:
                array.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                observe_broken_connection(self._group, parcel.source, what, error)
                self._group.check(error)
