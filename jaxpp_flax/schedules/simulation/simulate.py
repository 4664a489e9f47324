"""Discrete simulation of a schedule: the times of tasks, idle time, and memory.

A rank runs its tasks in order, each as soon as the rank is free and the inputs have arrived. The
simulation is exact for the model in :mod:`costs`. Residuals that a plan offloads also use the rank's link to its host;
gathers of parameters take the rank's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from jaxpp_flax.schedules.dependencies import needs, results
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.gathers import Gathers
from jaxpp_flax.schedules.progress import advance
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, streams
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable, Link, Transfer
from jaxpp_flax.schedules.simulation.gather_times import GatherEvent, GatherTimes, with_gathers_inside
from jaxpp_flax.schedules.simulation.host_link import HostEvent, HostLinks
from jaxpp_flax.schedules.task import AnyTask, FusedTask, Task, TaskKind
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
    transfer: Transfer
    residuals: ResidualPlan | None = None
    host_events: tuple[tuple[HostEvent, ...], ...] = ()
    gather_events: tuple[tuple[GatherEvent, ...], ...] = ()

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return ``(time, memory from this time on)`` at each change on the devices of ``rank``."""
        table = self.costs.table(self.num_stages, self.residuals)
        copies = self.host_events[rank] if self.host_events else ()
        gathered = self.gather_events[rank] if self.gather_events else ()
        return _memory_steps(_device_changes(self.events[rank], (*copies, *gathered), table))

    def host_memory(self, rank: int) -> list[tuple[float, float]]:
        """Return ``(time, activation memory from this time on)`` at each change on the host of ``rank``."""
        return _memory_steps(_host_changes(self.host_events[rank] if self.host_events else ()))

    def critical_path(self) -> list[Event]:
        """Return a chain of tasks that ends with the step; each task waits for the one before.

        Between two tasks of the chain is either nothing (the rank was busy) or a transfer. To end
        the step earlier, a task or a transfer of this chain must become shorter.

        >>> from jaxpp_flax.schedules import GPipe
        >>> [event.task for event in simulate(GPipe(2), num_microbatches=1).critical_path()]
        [fwd_0__0, fwd_1__0, bwd_1__0, bwd_0__0]
        """
        table = self.costs.table(self.num_stages, self.residuals)
        fetches = {
            (rank, copy.stage, copy.microbatch): copy for rank, copies in enumerate(self.host_events) for copy in copies
        }
        made: dict[Task, Event] = {}
        before: dict[AnyTask, Event] = {}
        for events in self.events:
            for i, event in enumerate(events):
                made |= dict.fromkeys(results(event.task), event)
                if i:
                    before[event.task] = events[i - 1]
        current = max((events[-1] for events in self.events if events), key=lambda e: e.end, default=None)
        path: list[Event] = []
        while current is not None:
            path.append(current)
            causes: list[tuple[float, Event]] = []
            previous = before.get(current.task)
            if previous is not None:
                causes.append((previous.end, previous))
            for need in needs(current.task, self.num_stages):
                maker = made.get(need)
                if maker is not None:
                    apart = maker.rank != current.rank
                    wait = self.transfer.time(maker.rank, current.rank, table.sent_bytes(need)) if apart else 0.0
                    fetch = fetches.get((current.rank, need.stage, need.microbatch))
                    kept = need.kind is TaskKind.FORWARD and need.stage == current.task.stage
                    causes.append((fetch.fetch_end if kept and fetch else maker.end + wait, maker))
            current = max(causes, key=lambda cause: cause[0])[1] if causes else None
        return path[::-1]


def _device_changes(
    events: Iterable[Event], copies: Iterable[HostEvent | GatherEvent], table: CostTable
) -> list[tuple[float, int, float]]:
    changes: list[tuple[float, int, float]] = []
    for event in events:
        before, after = table.memory_change(event.task)
        # At the same time, ending tasks free memory before starting tasks take memory.
        changes += [(event.start, 1, before), (event.end, 0, after)]
    return changes + [(time, int(change > 0), change) for copy in copies for time, change in copy.device_changes()]


def _host_changes(copies: Iterable[HostEvent]) -> list[tuple[float, int, float]]:
    return [(time, int(change > 0), change) for copy in copies for time, change in copy.host_changes()]


def _memory_steps(changes: list[tuple[float, int, float]]) -> list[tuple[float, float]]:
    held = 0.0
    steps: list[tuple[float, float]] = []
    for time, _, change in sorted(changes):
        if change:
            held += change
            steps.append((time, held))
    return steps


class _Recorder:
    """Collects a summary task by task, and the events if requested."""

    def __init__(self, num_ranks: int, table: CostTable, keep: bool) -> None:
        stages = range(len(table.forward))
        changes = {kind: [table.memory_change(Task(kind, stage, 0)) for stage in stages] for kind in TaskKind}
        # For each kind and stage: the memory added at the start, and the difference that remains after the end.
        self.changes = {kind: [(added, added + freed) for added, freed in rows] for kind, rows in changes.items()}
        self.fused_changes = [(activation, 0.0) for activation in table.activation]
        self.busy = [0.0] * num_ranks
        self.first: list[float | None] = [None] * num_ranks
        self.last = [0.0] * num_ranks
        self.held = [0.0] * num_ranks
        self.peak = [0.0] * num_ranks
        self.count = 0
        self.events: list[list[Event]] | None = [[] for _ in range(num_ranks)] if keep else None

    def __call__(self, rank: int, task: AnyTask, start: float, end: float) -> None:
        self.count += 1
        self.busy[rank] += end - start
        if self.first[rank] is None:
            self.first[rank] = start
        self.last[rank] = end
        changes = self.fused_changes if isinstance(task, FusedTask) else self.changes[task.kind]
        added, difference = changes[task.stage]
        held = self.held[rank]
        if held + added > self.peak[rank]:
            self.peak[rank] = held + added
        self.held[rank] = held + difference
        if self.events is not None:
            self.events[rank].append(Event(task, rank, start, end))

    def figures(self) -> dict[str, object]:
        return {
            "makespan": max(self.last, default=0.0),
            "busy": tuple(self.busy),
            "first_start": tuple(first or 0.0 for first in self.first),
            "last_end": tuple(self.last),
            "peak_memory": tuple(self.peak),
            "num_tasks": self.count,
            "peak_host_memory": (0.0,) * len(self.busy),
        }


def _peak(steps: list[tuple[float, float]]) -> float:
    return max((held for _, held in steps), default=0.0)


def _run_with_copies(
    schedule: Schedule | TaskLists,
    costs: Costs,
    transfer: Transfer,
    num_microbatches: int | None,
    processors: int | None,
    plan: ResidualPlan | None,
    link: Link,
    gathers: Gathers | None,
) -> Timeline:
    """Run ``schedule`` with copies and gathers; the memory changes between tasks too, so all events are kept."""
    iterables, num_stages = streams(schedule, num_microbatches)
    ranks = [list(tasks) for tasks in iterables]
    plan = ResidualPlan.keep(num_stages) if plan is None else plan
    table = with_gathers_inside(costs.table(num_stages, plan), gathers)
    recorder, links = _Recorder(len(ranks), table, keep=True), HostLinks(ranks, plan, table, link)
    gathered = GatherTimes(ranks, gathers)

    def hold(rank: int, position: int, free: float, start: float) -> float:
        free = gathered.hold(rank, position, links.left(rank, position, free))
        return links.hold(rank, position, free, start)

    def record(rank: int, task: AnyTask, start: float, end: float) -> None:
        recorder(rank, task, start, end)
        links.ended(rank, end)
        gathered.ended(rank, end)

    delay = _delay(transfer, table)
    blocked = advance(ranks, num_stages, record, table=table, delay=delay, hold=hold, processors=processors)
    if blocked:
        raise deadlock_error(ranks, blocked)
    events = tuple(tuple(rank) for rank in recorder.events or ())
    changes = zip(events, links.events, gathered.events, strict=True)
    recorder.last = [end + after for end, after in zip(recorder.last, gathered.after_loop, strict=True)]
    figures = {
        **recorder.figures(),
        "first_start": tuple((s or 0.0) - gathered.seconds(rank, 0) for rank, s in enumerate(recorder.first)),
        "peak_memory": tuple(_peak(_memory_steps(_device_changes(e, (*c, *g), table))) for e, c, g in changes),
        "peak_host_memory": tuple(_peak(_memory_steps(_host_changes(copies))) for copies in links.events),
    }
    return Timeline(
        **figures,  # type: ignore[arg-type]
        events=events,
        num_stages=num_stages,
        costs=costs,
        transfer=transfer,
        residuals=plan,
        host_events=links.events,
        gather_events=tuple(map(tuple, gathered.events)),
    )


def _delay(transfer: Transfer, table: CostTable) -> Callable[[int, int, Task], float] | None:
    """Return the time that a result takes from rank to rank; None if all transfers are instant."""
    instant = not transfer.links and transfer.default.time(1.0) == 0.0
    return None if instant else lambda source, target, result: transfer.time(source, target, table.sent_bytes(result))


def _run(
    schedule: Schedule | TaskLists,
    costs: Costs,
    transfer: Transfer,
    num_microbatches: int | None,
    keep: bool,
    processors: int | None = None,
) -> tuple[_Recorder, int]:
    ranks, num_stages = streams(schedule, num_microbatches)
    table = costs.table(num_stages)
    recorder = _Recorder(len(ranks), table, keep)
    delay = _delay(transfer, table)
    blocked = advance(ranks, num_stages, recorder, table=table, delay=delay, processors=processors)
    if blocked:
        raise deadlock_error([list(tasks) for tasks in streams(schedule, num_microbatches)[0]], blocked)
    return recorder, num_stages


def simulate(
    schedule: Schedule | TaskLists,
    costs: Costs | None = None,
    transfer: Transfer | float | None = None,
    *,
    num_microbatches: int | None = None,
    processors: int | None = None,
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
        processors: the number of tasks that can run at once, over all ranks: the cores of a machine
            with virtual devices as ranks. By default every rank has its own processor.
        residuals: what each stage does with its residuals; by default it keeps them on the devices.
        host_link: the link between each rank's devices and its host, for offloaded residuals; by default instant. Each
            direction carries one copy at a time, beside the tasks. An offload starts when its forward ends, a fetch
            when the rank comes to it, and the backward waits for the fetch.
        gathers: the parameters that stages gather (FSDP), and how often; by default nothing is gathered.

    Raises:
        ScheduleError: if ``schedule`` deadlocks, ``processors`` is below 1, or ``residuals`` has entries for another
            number of stages.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> step = simulate(Std1F1B(4), num_microbatches=8)
    >>> step.makespan, round(step.bubble, 3), step.peak_memory
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))
    >>> simulate(Std1F1B(4), num_microbatches=8, processors=1).makespan  # 4 ranks x 8 x (1 + 2)
    96.0
    >>> from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
    >>> plan = ResidualPlan([StageResiduals(offload=1.0), KEEP, KEEP, KEEP])
    >>> moved = simulate(Std1F1B(4), num_microbatches=8, residuals=plan, host_link=Link(bandwidth=1.0))
    >>> moved.makespan, moved.peak_memory, moved.peak_host_memory
    (33.0, (3.0, 3.0, 2.0, 1.0), (3.0, 0.0, 0.0, 0.0))
    """
    if processors is not None and processors < 1:
        raise ScheduleError(f"processors must be at least 1, got {processors}")
    costs = Costs() if costs is None else costs
    links = Transfer.of(transfer)
    if gathers is not None or (residuals is not None and not residuals.is_kept):
        link = Link() if host_link is None else host_link
        return _run_with_copies(schedule, costs, links, num_microbatches, processors, residuals, link, gathers)
    recorder, num_stages = _run(schedule, costs, links, num_microbatches, keep=True, processors=processors)
    if residuals is not None:
        residuals.check(num_stages)
    events = tuple(tuple(rank) for rank in recorder.events or ())
    return Timeline(**recorder.figures(), events=events, num_stages=num_stages, costs=costs, transfer=links)  # type: ignore[arg-type]


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
    costs = Costs() if costs is None else costs
    if residuals is not None or gathers is not None:
        step = simulate(
            schedule, costs, transfer, num_microbatches=num_microbatches, residuals=residuals, host_link=host_link,
            gathers=gathers,
        )  # fmt: skip
        return Summary(**{each.name: getattr(step, each.name) for each in fields(Summary)})
    recorder, _ = _run(schedule, costs, Transfer.of(transfer), num_microbatches, keep=False)
    return Summary(**recorder.figures())  # type: ignore[arg-type]


def replay(events: Iterable[Iterable[Event]], costs: Costs | None = None) -> Timeline:
    """Make a :class:`Timeline` from events with their own times, such as the events of a measured step.

    Times are shifted so that the first task starts at 0.
    """
    ranks = [sorted(rank, key=lambda event: event.start) for rank in events]
    everything = [event for rank in ranks for event in rank]
    zero = min((event.start for event in everything), default=0.0)
    num_stages = 1 + max((event.task.stage for event in everything), default=-1)
    costs = Costs() if costs is None else costs
    recorder = _Recorder(len(ranks), costs.table(num_stages), keep=True)
    for rank, listed in enumerate(ranks):
        for event in listed:
            recorder(rank, event.task, event.start - zero, event.end - zero)
    kept = tuple(tuple(rank) for rank in recorder.events or ())
    return Timeline(**recorder.figures(), events=kept, num_stages=num_stages, costs=costs, transfer=Transfer())  # type: ignore[arg-type]
