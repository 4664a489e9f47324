"""The gathers of parameters in a simulated step: each takes its rank's time before the task that reads them first.

The one reduction of their gradients takes its rank's time after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpp_flax.schedules.gathers import GatheredParameter, Gathers
from jaxpp_flax.schedules.simulation.costs import CostTable
from jaxpp_flax.schedules.task import AnyTask, TaskKind

__all__ = ["GatherEvent", "GatherTimes", "with_gathers_inside"]


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
    times = {kind: longer(of, 2 if kind is TaskKind.BACKWARD else 1) for kind, of in table.times.items()}
    return replace(table, times=times, fused=longer(table.fused, 2))


class GatherTimes:
    """The gathers of all ranks while a schedule is simulated.

    Args:
        ranks: each rank's tasks.
        gathers: the parameters; None: nothing is gathered.
    """

    def __init__(self, ranks: Sequence[Sequence[AnyTask]], gathers: Gathers | None) -> None:
        self.gathers = gathers
        self.stages = [{task.stage for task in tasks} for tasks in ranks]
        self.position = [0] * len(ranks)
        self.before: list[dict[int, list[GatheredParameter]]] = [{} for _ in ranks]
        self.after: list[dict[int, list[GatheredParameter]]] = [{} for _ in ranks]
        self.starts: list[dict[GatheredParameter, float]] = [{} for _ in ranks]
        self.events: list[list[GatherEvent]] = [[] for _ in ranks]
        for rank, tasks in enumerate(ranks):
            for each in () if gathers is None else gathers.held(tasks):
                self.before[rank].setdefault(each.gather_before, []).append(each)
                self.after[rank].setdefault(each.read_last, []).append(each)

    def seconds(self, rank: int, position: int) -> float:
        """Return the time of the gathers before a task."""
        new = self.before[rank].get(position, ())
        return 0.0 if self.gathers is None else self.gathers.seconds(sum(each.nbytes for each in new))

    def hold(self, rank: int, position: int, free: float) -> float:
        """Start the gathers before a task when the rank is free; return when the rank is free again."""
        self.starts[rank].update(dict.fromkeys(self.before[rank].get(position, ()), free))
        return free + self.seconds(rank, position)

    @property
    def after_loop(self) -> list[float]:
        """For each rank, the time of the reduction of its gradients after its last task."""
        if self.gathers is None:
            return [0.0] * len(self.stages)
        return [self.gathers.seconds(self.gathers.reduced_once(stages)) for stages in self.stages]

    def ended(self, rank: int, end: float) -> None:
        """Note the end of a rank's next task: what it read last is freed."""
        position = self.position[rank]
        self.position[rank] += 1
        for each in self.after[rank].get(position, ()):
            self.events[rank].append(GatherEvent(each.name, each.nbytes, self.starts[rank].pop(each), end))
