"""Discrete simulation of a schedule: the times of tasks, idle time, and memory.

A rank runs its tasks in order, each as soon as the rank is free and the inputs have arrived. The
simulation is exact for the model in :mod:`costs`. Residuals that a plan offloads also use the rank's link to its host;
gathers of parameters take the rank's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxpp_flax.schedules.gathers import Gathers
from jaxpp_flax.schedules.memory import Memory, StageBytes
from jaxpp_flax.schedules.progress import Emit, Hold, advance
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, streams
from jaxpp_flax.schedules.simulation.between_tasks import BetweenTasks, GatherEvent, HostEvent, with_gathers_inside
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable, Link, Transfer
from jaxpp_flax.schedules.task import AnyTask, FusedTask, Task, TaskKind, fused
from jaxpp_flax.schedules.validate import deadlock_error


@dataclass(frozen=True, slots=True)
class Event:
    """The run of one task."""

    task: AnyTask
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class Summary:
    """The figures of a simulated (or measured) step, without the events.

    Attributes:
        makespan: the time from the first task's start to the last task's end, over all ranks.
        busy: the compute time of each rank.
        first_start: the start of each rank's first task, or of a gather that must run before it.
        last_end: the end of each rank's last task.
        peak_memory: the maximum memory of activations and gathered parameters of each rank's devices at one time.
        num_tasks: the number of tasks; a fused task counts once.
        peak_host_memory: the maximum activation memory of each rank on its host at one time.
    """

    makespan: float
    busy: tuple[float, ...]
    first_start: tuple[float, ...]
    last_end: tuple[float, ...]
    peak_memory: tuple[float, ...]
    num_tasks: int
    peak_host_memory: tuple[float, ...]

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

        A rank may start the next step when it has ended this one. So the time from step to step is
        the longest time between a rank's own first start and last end.
        """
        return max((e - s for s, e in zip(self.first_start, self.last_end, strict=True)), default=0.0)

    @property
    def steady_bubble(self) -> float:
        """The bubble of a sequence of steps without barriers between them."""
        total = self.period * len(self.busy)
        return 1.0 - sum(self.busy) / total if total else 0.0


@dataclass(frozen=True)
class Timeline(Summary):
    """A :class:`Summary` and the events behind it, by rank and in order of time.

    ``host_events`` holds each rank's copies to the host and back; ``residuals`` is the plan behind them.
    ``gather_events`` holds what each rank gathers.
    """

    events: tuple[tuple[Event, ...], ...]
    num_stages: int
    costs: Costs
    residuals: ResidualPlan | None = None
    host_events: tuple[tuple[HostEvent, ...], ...] = ()
    gather_events: tuple[tuple[GatherEvent, ...], ...] = ()

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return ``(time, memory from this time on)`` at each change on the devices of ``rank``."""
        stages = self.costs.table(self.num_stages, self.residuals).stages
        changes: list[tuple[float, float]] = []
        for event in self.events[rank]:
            taken, left = stages[event.task.stage].changes(event.task)
            changes += [(event.start, taken), (event.end, left)]
        for events in (self.host_events, self.gather_events):
            changes += [change for each in (events[rank] if events else ()) for change in each.device_changes()]
        return _live_by_time(changes)

    def host_memory(self, rank: int) -> list[tuple[float, float]]:
        """Return ``(time, activation memory from this time on)`` at each change on the host of ``rank``."""
        copies = self.host_events[rank] if self.host_events else ()
        return _live_by_time(change for copy in copies for change in copy.host_changes())


def _live_by_time(changes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Walk changes of memory in the order of time; of those at one time, the ones that free memory come first."""
    memory, steps = Memory(), list[tuple[float, float]]()
    for time, change in sorted(changes, key=lambda each: (each[0], each[1] > 0)):
        if change:
            memory.change(change)
            steps.append((time, memory.live))
    return steps


class _Recorder:
    """Collects the figures of a step task by task, and the events if requested."""

    def __init__(self, num_ranks: int, stages: Sequence[StageBytes], keep: bool) -> None:
        self.changes = {kind: [of.changes(Task(kind, n, 0)) for n, of in enumerate(stages)] for kind in TaskKind}
        self.fused_changes = [of.changes(fused(n, 0)) for n, of in enumerate(stages)]
        self.busy = [0.0] * num_ranks
        self.first: list[float | None] = [None] * num_ranks
        self.last = [0.0] * num_ranks
        self.memory = [Memory() for _ in range(num_ranks)]
        self.count = 0
        self.keep = keep
        self.events: list[list[Event]] = [[] for _ in range(num_ranks)]

    def __call__(self, rank: int, task: AnyTask, start: float, end: float) -> None:
        self.count += 1
        self.busy[rank] += end - start
        if self.first[rank] is None:
            self.first[rank] = start
        self.last[rank] = end
        changes = self.fused_changes if isinstance(task, FusedTask) else self.changes[task.kind]
        for change in changes[task.stage]:
            self.memory[rank].change(change)
        if self.keep:
            self.events[rank].append(Event(task, rank, start, end))

    def summary(self) -> Summary:
        return Summary(
            makespan=max(self.last, default=0.0),
            busy=tuple(self.busy),
            first_start=tuple(first or 0.0 for first in self.first),
            last_end=tuple(self.last),
            peak_memory=tuple(float(memory.peak) for memory in self.memory),
            num_tasks=self.count,
            peak_host_memory=(0.0,) * len(self.busy),
        )

    def timeline(self, costs: Costs, **fields: Any) -> Timeline:
        return Timeline(**vars(self.summary()), events=tuple(map(tuple, self.events)), costs=costs, **fields)


def _delay(transfer: Transfer, table: CostTable) -> Callable[[int, int, Task], float] | None:
    """Return the time that a result takes from rank to rank; None if all transfers are instant."""
    instant = not transfer.links and transfer.default.time(1.0) == 0.0
    return None if instant else lambda source, target, result: transfer.time(source, target, table.sent_bytes(result))


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
        num_microbatches: for a :class:`Schedule`; by default its own number, if it has one.
        residuals: what each stage does with its residuals; by default it keeps them on the devices.
        host_link: the link between each rank's devices and its host, for offloaded residuals; by default instant. Each
            direction carries one copy at a time, beside the tasks. An offload starts when its forward ends, a fetch
            when the rank comes to it, and the backward waits for the fetch.
        gathers: the parameters that stages gather (FSDP), and how often; by default nothing is gathered.

    Raises:
        ScheduleError: if ``schedule`` deadlocks, or ``residuals`` has entries for another number of stages.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> step = simulate(Std1F1B(4), num_microbatches=8)
    >>> step.makespan, round(step.bubble, 3), step.peak_memory
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))
    >>> from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
    >>> plan = ResidualPlan([StageResiduals(offload=1.0), KEEP, KEEP, KEEP])
    >>> moved = simulate(Std1F1B(4), num_microbatches=8, residuals=plan, host_link=Link(bandwidth=1.0))
    >>> moved.makespan, moved.peak_memory, moved.peak_host_memory
    (33.0, (3.0, 3.0, 2.0, 1.0), (3.0, 0.0, 0.0, 0.0))
    """
    costs, links = Costs() if costs is None else costs, Transfer.of(transfer)
    ranks, num_stages = streams(schedule, num_microbatches)
    table = costs.table(num_stages, residuals)
    if gathers is None and (residuals is None or residuals.is_kept):
        recorder = _Recorder(len(ranks), table.stages, keep=True)
        _advance(schedule, num_microbatches, ranks, recorder, table, links)
        return recorder.timeline(costs, num_stages=num_stages)
    lists = [list(tasks) for tasks in ranks]
    plan, table = residuals or ResidualPlan.keep(num_stages), with_gathers_inside(table, gathers)
    recorder = _Recorder(len(lists), table.stages, keep=True)
    between = [BetweenTasks(tasks, table, plan, host_link or Link(), gathers) for tasks in lists]

    def record(rank: int, task: AnyTask, start: float, end: float) -> None:
        between[rank].ended(len(recorder.events[rank]), end)
        recorder(rank, task, start, end)

    _advance(lists, None, lists, record, table, links, hold=lambda rank, *times: between[rank].start(*times))
    recorder.first = [(first or 0.0) - each.first for first, each in zip(recorder.first, between, strict=True)]
    recorder.last = [end + each.after_loop for end, each in zip(recorder.last, between, strict=True)]
    step = recorder.timeline(
        costs,
        num_stages=num_stages,
        residuals=plan,
        host_events=tuple(tuple(each.copies) for each in between),
        gather_events=tuple(tuple(each.gathered) for each in between),
    )
    devices, hosts = (
        tuple(max((live for _, live in steps(rank)), default=0.0) for rank in range(len(lists)))
        for steps in (step.memory, step.host_memory)
    )
    return replace(step, peak_memory=devices, peak_host_memory=hosts)


def _advance(
    schedule: Schedule | TaskLists,
    num_microbatches: int | None,
    ranks: Sequence[Iterable[AnyTask]],
    emit: Emit,
    table: CostTable,
    transfer: Transfer,
    hold: Hold | None = None,
) -> None:
    """Run the ranks of a schedule; refuse a deadlock."""
    blocked = advance(ranks, len(table.stages), emit, table=table, delay=_delay(transfer, table), hold=hold)
    if blocked:
        raise deadlock_error([list(tasks) for tasks in streams(schedule, num_microbatches)[0]], blocked)


def summarize(
    schedule: Schedule | TaskLists,
    costs: Costs | None = None,
    transfer: Transfer | float | None = None,
    *,
    num_microbatches: int | None = None,
    residuals: ResidualPlan | None = None,
    host_link: Link | None = None,
    gathers: Gathers | None = None,
) -> Summary:
    """Simulate as in :func:`simulate`, without the events: for schedules too large to keep.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> summarize(Std1F1B(64), num_microbatches=128).makespan
    573.0
    """
    if residuals is not None or gathers is not None:
        step = simulate(
            schedule, costs, transfer, num_microbatches=num_microbatches, residuals=residuals, host_link=host_link,
            gathers=gathers,
        )  # fmt: skip
        return Summary(**{each.name: getattr(step, each.name) for each in fields(Summary)})
    ranks, num_stages = streams(schedule, num_microbatches)
    table = (Costs() if costs is None else costs).table(num_stages)
    recorder = _Recorder(len(ranks), table.stages, keep=False)
    _advance(schedule, num_microbatches, ranks, recorder, table, Transfer.of(transfer))
    return recorder.summary()


def replay(events: Iterable[Iterable[Event]], costs: Costs | None = None) -> Timeline:
    """Make a :class:`Timeline` from events with their own times, such as the events of a measured step.

    Times are shifted so that the first task starts at 0.
    """
    ranks = [sorted(rank, key=lambda event: event.start) for rank in events]
    everything = [event for rank in ranks for event in rank]
    zero = min((event.start for event in everything), default=0.0)
    num_stages = 1 + max((event.task.stage for event in everything), default=-1)
    costs = Costs() if costs is None else costs
    recorder = _Recorder(len(ranks), costs.table(num_stages).stages, keep=True)
    for rank, listed in enumerate(ranks):
        for event in listed:
            recorder(rank, event.task, event.start - zero, event.end - zero)
    return recorder.timeline(costs, num_stages=num_stages)
