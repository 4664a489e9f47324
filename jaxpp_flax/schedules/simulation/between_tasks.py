"""What a rank does between its tasks in a simulated step: it copies residuals to its host and back, and gathers.

A copy takes the rank's link to its host, beside the tasks: each direction carries one copy at a time, in the order of
the instructions. A gather of parameters takes the rank's own time before the task that reads them first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpp_flax.schedules.gathers import GatheredParameter, Gathers
from jaxpp_flax.schedules.residuals import HostCopy, ResidualPlan, host_copies
from jaxpp_flax.schedules.simulation.costs import CostTable, Link
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["BetweenTasks", "GatherEvent", "HostEvent", "with_gathers_inside"]


@dataclass(frozen=True, slots=True)
class HostEvent:
    """The offload and the fetch of what one microbatch keeps in one stage.

    Attributes:
        stage, microbatch: the forward that made the values.
        size: their bytes.
        offload_start, offload_end: the times of the copy to the host.
        fetch_issued: the time when the rank asked for the values; the copy may wait for the link.
        fetch_start, fetch_end: the times of the copy back.
    """

    stage: int
    microbatch: int
    size: float
    offload_start: float
    offload_end: float
    fetch_issued: float
    fetch_start: float
    fetch_end: float

    def device_changes(self) -> tuple[tuple[float, float], ...]:
        """Return (time, change of the device's memory) for each copy."""
        return (self.offload_end, -self.size), (self.fetch_start, self.size)

    def host_changes(self) -> tuple[tuple[float, float], ...]:
        """Return (time, change of the host's memory) for each copy."""
        return (self.offload_start, self.size), (self.fetch_end, -self.size)


@dataclass(frozen=True, slots=True)
class GatherEvent:
    """A parameter that a rank holds gathered.

    Attributes:
        name: the parameter.
        size: its bytes on each device.
        start: the time when the gather starts.
        freed: the time when the last task that reads the parameter ends.
    """

    name: str
    size: float
    start: float
    freed: float

    def device_changes(self) -> tuple[tuple[float, float], ...]:
        """Return (time, change of the device's memory)."""
        return (self.start, self.size), (self.freed, -self.size)


def with_gathers_inside(table: CostTable, gathers: Gathers | None) -> CostTable:
    """Return costs in which tasks also take the time of the gathers and the reductions that they run by themselves."""
    if gathers is None:
        return table
    moving = [gathers.seconds(gathers.in_every_task(stage)) for stage in range(len(table.stages))]

    def longer(times: Sequence[float], turns: int) -> list[float]:
        return [a + turns * b for a, b in zip(times, moving, strict=True)]

    # A backward gathers parameters and reduces gradients. A fused task is one program, which gathers once.
    twice = TaskKind.BACKWARD, TaskKind.FUSED
    return replace(
        table, times={kind: longer(durations, 2 if kind in twice else 1) for kind, durations in table.times.items()}
    )


class BetweenTasks:
    """The copies and the gathers of one rank while a schedule is simulated.

    Args:
        tasks: the rank's tasks.
        table: the costs with the plan.
        plan: what each stage does with its residuals.
        link: the link between the rank's devices and its host; both directions have this latency and bandwidth.
        gathers: the parameters; None: nothing is gathered.

    Attributes:
        copies: the copies so far, in the order of their fetches.
        gathered: the parameters so far that no later task reads.
        first: the seconds of the gathers before the first task.
        after_loop: the seconds of the reduction of gradients after the last task.
    """

    def __init__(
        self, tasks: Sequence[Task], table: CostTable, plan: ResidualPlan, link: Link, gathers: Gathers | None
    ) -> None:
        self.sizes, self.link, self.gathers = [stage.saved for stage in table.stages], link, gathers
        self.copies: list[HostEvent] = []
        self.gathered: list[GatherEvent] = []
        self._leaving, self._fetched, self._offloaded, self._read = (
            defaultdict[int, list[HostCopy]](list) for _ in range(4)
        )
        for copy in host_copies(tasks, plan):
            self._offloaded[copy.offload_after].append(copy)
            self._fetched[copy.fetch_before].append(copy)
            self._read[copy.read_at].append(copy)
            if copy.gone_before is not None:
                self._leaving[copy.gone_before].append(copy)
        self._new, self._done = (defaultdict[int, list[GatheredParameter]](list) for _ in range(2))
        for each in () if gathers is None else gathers.held(tasks):
            self._new[each.gather_before].append(each)
            self._done[each.read_last].append(each)
        self._out: dict[HostCopy, tuple[float, float]] = {}
        self._back: dict[HostCopy, float] = {}
        self._since: dict[GatheredParameter, float] = {}
        self._free_out = self._free_in = 0.0
        self.first = self._gather_seconds(0)
        stages = {task.stage for task in tasks}
        self.after_loop = 0.0 if gathers is None else gathers.seconds(gathers.reduced_once(stages))

    def start(self, position: int, free: float, start: float) -> float:
        """Return when a task can start whose rank is free, and whose inputs have arrived, at these times.

        The rank waits for the offloads that must end before the task; it gathers, and starts the fetches in front of
        the task. The task waits for its own values.
        """
        free = max([free, *(self._out[copy][1] for copy in self._leaving[position])])
        self._since.update(dict.fromkeys(self._new[position], free))
        free += self._gather_seconds(position)
        for copy in self._fetched[position]:
            size, out = self.sizes[copy.stage], self._out.pop(copy)
            start_in = max(free, out[1], self._free_in)
            self._back[copy] = self._free_in = start_in + self.link.time(size)
            self.copies.append(HostEvent(copy.stage, copy.microbatch, size, *out, free, start_in, self._free_in))
        return max([start, free, *(self._back.pop(copy) for copy in self._read[position])])

    def ended(self, position: int, end: float) -> None:
        """Note the end of a task: the offload behind it starts, and what it read last is freed."""
        for copy in self._offloaded[position]:
            start = max(end, self._free_out)
            self._free_out = start + self.link.time(self.sizes[copy.stage])
            self._out[copy] = start, self._free_out
        for each in self._done[position]:
            self.gathered.append(GatherEvent(each.name, each.nbytes, self._since.pop(each), end))

    def _gather_seconds(self, position: int) -> float:
        return 0.0 if self.gathers is None else self.gathers.seconds(sum(each.nbytes for each in self._new[position]))
