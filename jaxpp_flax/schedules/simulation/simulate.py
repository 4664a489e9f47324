"""Discrete simulation of a schedule: the times of tasks, idle time, and memory.

A rank runs its tasks in order, each as soon as the rank is free and the inputs have arrived. The
simulation is exact for the model in :mod:`costs`. Residuals that a plan offloads also use the rank's link to its host;
gathers of parameters take the rank's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpp_flax.schedules.gathers import Gathers
from jaxpp_flax.schedules.memory import MemoryInUse
from jaxpp_flax.schedules.progress import advance
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, task_lists
from jaxpp_flax.schedules.simulation.between_tasks import BetweenTasks, GatherEvent, HostEvent, with_gathers_inside
from jaxpp_flax.schedules.simulation.costs import Costs, Link, Transfer
from jaxpp_flax.schedules.task import Task
from jaxpp_flax.schedules.validate import deadlock_error


@dataclass(frozen=True, slots=True)
class Event:
    """The run of one task."""

    task: Task
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of a simulated or measured step, and figures computed from them.

    Attributes:
        events: the runs of each rank's tasks, in order of time.
        num_stages: the number of stages.
        costs: times and memory.
        residuals: what each stage does with its residuals; None: it keeps them on the devices.
        host_events: each rank's copies to the host and back; empty if nothing is offloaded.
        gather_events: what each rank gathers; empty if nothing is gathered.
        gathering: the time that each rank gathers before its first task.
        reducing: the time that each rank reduces gradients after its last task.
    """

    events: tuple[tuple[Event, ...], ...]
    num_stages: int
    costs: Costs
    residuals: ResidualPlan | None = None
    host_events: tuple[tuple[HostEvent, ...], ...] = ()
    gather_events: tuple[tuple[GatherEvent, ...], ...] = ()
    gathering: tuple[float, ...] = ()
    reducing: tuple[float, ...] = ()

    @property
    def num_tasks(self) -> int:
        """The number of tasks; a fused task counts once."""
        return sum(map(len, self.events))

    @cached_property
    def makespan(self) -> float:
        """The time from the first task's start to the last task's end, over all ranks."""
        return max(self.last_end, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The compute time of each rank."""
        return tuple(sum((event.end - event.start for event in events), 0.0) for events in self.events)

    @cached_property
    def first_start(self) -> tuple[float, ...]:
        """The start of each rank's first task, or of a gather that must run before it."""
        return tuple(
            (events[0].start if events else 0.0) - (self.gathering[rank] if self.gathering else 0.0)
            for rank, events in enumerate(self.events)
        )

    @cached_property
    def last_end(self) -> tuple[float, ...]:
        """The end of each rank's last task, or of the reduction of gradients after it."""
        return tuple(
            (events[-1].end if events else 0.0) + (self.reducing[rank] if self.reducing else 0.0)
            for rank, events in enumerate(self.events)
        )

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time over the makespan."""
        total = self.makespan * len(self.busy)
        return 1.0 - sum(self.busy) / total if total else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Each rank's idle time over the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def period(self) -> float:
        """The time of a step in a sequence of steps without barriers between them.

        A rank starts the next step when it has ended this step. So the period is the longest time from the start of a
        rank's first task to the end of its last task, over all ranks.
        """
        return max((e - s for s, e in zip(self.first_start, self.last_end, strict=True)), default=0.0)

    @property
    def steady_bubble(self) -> float:
        """The bubble of a sequence of steps without barriers between them."""
        total = self.period * len(self.busy)
        return 1.0 - sum(self.busy) / total if total else 0.0

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The maximum memory of activations and gathered parameters of each rank's devices at one time."""
        return tuple(max((live for _, live in self.memory(rank)), default=0.0) for rank in range(len(self.events)))

    @cached_property
    def peak_host_memory(self) -> tuple[float, ...]:
        """The maximum activation memory of each rank on its host at one time."""
        return tuple(max((live for _, live in self.host_memory(rank)), default=0.0) for rank in range(len(self.events)))

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return ``(time, memory from this time on)`` at each change on the devices of ``rank``."""
        stages = self.costs.table(self.num_stages, self.residuals).stages
        of_tasks: list[tuple[float, float]] = []
        for event in self.events[rank]:
            taken, left = stages[event.task.stage].changes(event.task)
            of_tasks += [(event.start, taken), (event.end, left)]
        copies, gathers = (events[rank] if events else () for events in (self.host_events, self.gather_events))
        return _live_by_time([change for each in (*copies, *gathers) for change in each.device_changes()], of_tasks)

    def host_memory(self, rank: int) -> list[tuple[float, float]]:
        """Return ``(time, activation memory from this time on)`` at each change on the host of ``rank``."""
        copies = self.host_events[rank] if self.host_events else ()
        return _live_by_time([change for copy in copies for change in copy.host_changes()])


def _live_by_time(
    copies: Sequence[tuple[float, float]], tasks: Sequence[tuple[float, float]] = ()
) -> list[tuple[float, float]]:
    """Walk changes of memory in the order of time.

    At one time, what frees memory comes first; but a task that takes no time frees after it has taken.
    """
    ordered = [*(each for each in copies if each[1] < 0), *tasks, *(each for each in copies if each[1] > 0)]
    memory, steps = MemoryInUse(), list[tuple[float, float]]()
    for time, change in sorted(ordered, key=lambda each: each[0]):
        if change:
            memory.change(change)
            steps.append((time, memory.live))
    return steps


def simulate(
    schedule: Schedule | TaskLists,
    costs: Costs | None = None,
    transfer: Transfer | float | None = None,
    *,
    num_microbatches: int | None = None,
    residuals: ResidualPlan | None = None,
    host_link: Link | None = None,
    gathers: Gathers | None = None,
) -> Timeline:
    """Run ``schedule`` in the model, and return the events with their times.

    Args:
        schedule: a :class:`Schedule`, or each rank's tasks in order.
        costs: times and memory; by default 1 for ``F``, ``I`` and ``W``, 2 for ``B``.
        transfer: the links, or one latency for all of them; by default instant.
        num_microbatches: the number of microbatches of a :class:`Schedule`; by default its own number, if it has one.
        residuals: what each stage does with its residuals; by default it keeps them on the devices.
        host_link: the link between each rank's devices and its host, for offloaded residuals; by default instant. Each
            direction carries one copy at a time, while tasks run. An offload starts when its forward ends. A fetch
            starts before the task that ``ResidualPlan.fetch_ahead`` gives, and the backward waits for its end.
        gathers: the parameters that stages gather (FSDP), and how often; by default nothing is gathered.

    Raises:
        ScheduleError: if ``schedule`` deadlocks, or ``residuals`` has entries for another number of stages.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> step = simulate(Std1F1B(4), num_microbatches=8)
    >>> step.makespan, round(step.bubble, 3), step.peak_memory
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))
    >>> from jaxpp_flax.schedules import ResidualPlan, StageResiduals
    >>> keep = StageResiduals()
    >>> plan = ResidualPlan([StageResiduals(offload=1.0), keep, keep, keep])
    >>> moved = simulate(Std1F1B(4), num_microbatches=8, residuals=plan, host_link=Link(bandwidth=1.0))
    >>> moved.makespan, moved.peak_memory, moved.peak_host_memory
    (33.0, (3.0, 3.0, 2.0, 1.0), (3.0, 0.0, 0.0, 0.0))
    """
    costs, links = Costs() if costs is None else costs, Transfer.of(transfer)
    lists, num_stages = task_lists(schedule, num_microbatches)
    table = with_gathers_inside(costs.table(num_stages, residuals), gathers)
    plan = None if residuals is None or residuals.is_kept else residuals
    between: list[BetweenTasks] = []
    if plan is not None or gathers is not None:
        moved = plan or ResidualPlan.keep(num_stages)
        between = [BetweenTasks(tasks, table, moved, host_link or Link(), gathers) for tasks in lists]
    events: list[list[Event]] = [[] for _ in lists]

    def record(rank: int, task: Task, start: float, end: float) -> None:
        if between:
            between[rank].ended(len(events[rank]), end)
        events[rank].append(Event(task, rank, start, end))

    blocked = advance(
        lists,
        num_stages,
        record,
        table=table,
        delay=lambda source, target, result: links.time(source, target, table.sent_bytes(result)),
        hold=(lambda rank, *times: between[rank].start(*times)) if between else None,
    )
    if blocked:
        raise deadlock_error(lists, blocked)
    return Timeline(
        tuple(map(tuple, events)),
        num_stages,
        costs,
        residuals=plan,
        host_events=tuple(tuple(each.copies) for each in between),
        gather_events=tuple(tuple(each.gathered) for each in between),
        gathering=tuple(each.first for each in between),
        reducing=tuple(each.after_loop for each in between),
    )


def replay(events: Iterable[Iterable[Event]], costs: Costs | None = None) -> Timeline:
    """Make a :class:`Timeline` from events with their own times, such as the events of a measured step.

    Times are shifted so that the first task starts at 0.
    """
    ranks = [sorted(rank, key=lambda event: event.start) for rank in events]
    zero = min((rank[0].start for rank in ranks if rank), default=0.0)
    num_stages = 1 + max((event.task.stage for rank in ranks for event in rank), default=-1)
    shifted = (
        tuple(replace(event, rank=rank, start=event.start - zero, end=event.end - zero) for event in listed)
        for rank, listed in enumerate(ranks)
    )
    return Timeline(tuple(shifted), num_stages, Costs() if costs is None else costs)
