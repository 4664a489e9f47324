"""The copies of residuals between a rank's devices and its host, in a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.schedules.residuals import HostCopy, ResidualPlan, host_copies
from jaxpp_flax.schedules.simulation.costs import CostTable, Link
from jaxpp_flax.schedules.task import AnyTask

__all__ = ["HostEvent", "HostLinks"]


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


class _RankLink:
    """One rank's link to its host: each direction carries one copy at a time, in the order of the instructions."""

    def __init__(self, copies: Sequence[HostCopy], sizes: Sequence[float], link: Link) -> None:
        self.sizes, self.link = sizes, link
        self.offload_after = {copy.offload_after: copy for copy in copies}
        self.read_at = {copy.read_at: copy for copy in copies}
        self.fetch_before: dict[int, list[HostCopy]] = {}
        for copy in copies:
            self.fetch_before.setdefault(copy.fetch_before, []).append(copy)
        self.gone_before: dict[int, list[HostCopy]] = {}
        for copy in copies:
            if copy.gone_before is not None:
                self.gone_before.setdefault(copy.gone_before, []).append(copy)
        self.free_out = self.free_in = 0.0
        self.offloaded: dict[HostCopy, tuple[float, float]] = {}
        self.fetched: dict[HostCopy, float] = {}
        self.events: list[HostEvent] = []

    def fetch(self, copy: HostCopy, issued: float) -> None:
        size, out = self.sizes[copy.stage], self.offloaded.pop(copy)
        start = max(issued, out[1], self.free_in)
        end = self.free_in = self.fetched[copy] = start + self.link.time(size)
        self.events.append(HostEvent(copy.stage, copy.microbatch, size, *out, issued, start, end))

    def offload(self, copy: HostCopy, made: float) -> None:
        start = max(made, self.free_out)
        self.free_out = start + self.link.time(self.sizes[copy.stage])
        self.offloaded[copy] = start, self.free_out


class HostLinks:
    """The host links of all ranks while a schedule is simulated.

    Args:
        ranks: each rank's tasks.
        plan: what each stage does with its residuals.
        table: the costs with this plan.
        link: the link between a rank's devices and its host; both directions have this latency and bandwidth.
    """

    def __init__(self, ranks: Sequence[Sequence[AnyTask]], plan: ResidualPlan, table: CostTable, link: Link) -> None:
        moved = [stage.moved for stage in table.stages]
        self.links = [_RankLink(host_copies(tasks, plan), moved, link) for tasks in ranks]
        self.position = [0] * len(ranks)

    @property
    def events(self) -> tuple[tuple[HostEvent, ...], ...]:
        """Each rank's copies, in the order of their fetches."""
        return tuple(tuple(link.events) for link in self.links)

    def left(self, rank: int, position: int, free: float) -> float:
        """Return when the rank is free, after it has waited for the offloads that end before a task."""
        link = self.links[rank]
        return max([free, *(link.offloaded[copy][1] for copy in link.gone_before.get(position, ()))])

    def hold(self, rank: int, position: int, free: float, start: float) -> float:
        """Start the fetches in front of a task when the rank is free; return when the task can start.

        The task waits for its own values.
        """
        link = self.links[rank]
        for copy in link.fetch_before.get(position, ()):
            link.fetch(copy, free)
        read = link.read_at.get(position)
        start = max(start, free)
        return start if read is None else max(start, link.fetched.pop(read))

    def ended(self, rank: int, end: float) -> None:
        """Note the end of a rank's next task, and start the offload behind it."""
        position = self.position[rank]
        self.position[rank] += 1
        link = self.links[rank]
        if position in link.offload_after:
            link.offload(link.offload_after[position], end)
