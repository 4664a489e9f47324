"""The order of microbatches that differ in cost, chosen by simulation: it changes how long ranks wait for each other.

The order of the tasks of a schedule stays; the order says which microbatch of a batch runs as its microbatch 0, 1, ....
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxpp_flax.schedules.progress import advance
from jaxpp_flax.schedules.schedule import Schedule, task_lists
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable, Transfer
from jaxpp_flax.schedules.task import Task, TaskKind, needs, results
from jaxpp_flax.schedules.validate import deadlock_error

__all__ = ["MicrobatchOrder", "order_by_cost"]

# A step of 16 microbatches on 8 ranks is simulated in about 0.1 ms.
_MOST_SWAPS = 24


@dataclass(frozen=True)
class MicrobatchOrder:
    """The order of the microbatches of a step.

    Attributes:
      order: at each place, the number of the microbatch that runs there.
      given: the simulated time of the step in the order as it was given.
      chosen: the simulated time of the step in this order.
    """

    order: tuple[int, ...]
    given: float
    chosen: float

    @property
    def gain(self) -> float:
        """How many times as fast the step is in this order, at least 1."""
        return self.given / self.chosen if self.chosen else 1.0

    @property
    def is_given(self) -> bool:
        """True if the order stays as it was given."""
        return self.order == tuple(range(len(self.order)))


def order_by_cost(
    schedule: Schedule, costs: Sequence[Costs], transfer: Transfer | float | None = None
) -> MicrobatchOrder:
    """Return an order of microbatches in which the simulated step takes no longer than in the given one.

    Tried are the longest first, the longest last, long and short by turns, the longest in the middle and at both ends;
    then swaps of two microbatches, as long as they help, and at most some dozens. The order depends on the costs alone,
    unless the given one is better than all of these: batches with equal microbatches in other orders run as one.

    Args:
      costs: of each microbatch; microbatches of one shape have equal costs.
      transfer: as in `simulate`.

    Raises:
      ScheduleError: if the schedule cannot run so many microbatches, or costs are for another number of stages.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> short, long = Costs(), Costs(forward=3.0, backward_input=3.0, backward_weight=3.0)
      >>> step = order_by_cost(Std1F1B(4), [short, long, short, short, short, long, short, short])
      >>> step.order, step.given, step.chosen, round(step.gain, 2)
      ((0, 2, 3, 1, 5, 4, 6, 7), 77.0, 58.0, 1.33)
    """
    lengths = list(dict.fromkeys(costs))
    step = _Step(_plan(schedule, len(costs)), [each.table(schedule.num_stages) for each in lengths], transfer)
    kinds = [lengths.index(each) for each in costs]
    given = step.seconds(kinds)
    if len(lengths) < 2:
        return MicrobatchOrder(tuple(range(len(costs))), given, given)
    totals = [sum(table.times[TaskKind.FUSED]) for table in step.tables]
    ascending = sorted(kinds, key=lambda kind: (totals[kind], kind))
    seconds, best = min((step.seconds(order), order) for order in _starts(ascending))
    for _ in range(_MOST_SWAPS // len(costs) + 1):
        swapped = min(((step.seconds(order), order) for order in _swaps(best)), default=(seconds, best))
        if swapped[0] >= seconds:
            break
        seconds, best = swapped
    if given < seconds:
        return MicrobatchOrder(tuple(range(len(costs))), given, given)
    return MicrobatchOrder(_numbers(kinds, best), given, seconds)


def _starts(ascending: list[int]) -> Iterator[list[int]]:
    yield ascending[::-1]
    yield ascending
    half = len(ascending) // 2
    turns = [*ascending]
    turns[::2], turns[1::2] = ascending[half:][::-1], ascending[:half]
    yield turns
    yield [*ascending[::2], *ascending[1::2][::-1]]  # the longest in the middle
    yield [*ascending[::-2], *ascending[-2::-2][::-1]]  # the longest at both ends


def _swaps(order: list[int]) -> Iterator[list[int]]:
    """Swap each two neighbours that differ."""
    for place in range(len(order) - 1):
        if order[place] != order[place + 1]:
            yield [*order[:place], order[place + 1], order[place], *order[place + 2 :]]


def _numbers(kinds: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatches in an order of their kinds; those of one kind stay in their own order."""
    of_kind = {kind: iter([n for n, each in enumerate(kinds) if each == kind]) for kind in set(kinds)}
    return tuple(next(of_kind[kind]) for kind in order)


@dataclass(frozen=True, slots=True)
class _Read:
    """A result that a task reads: the place of its maker in the step; if it comes from another rank, both ranks."""

    maker: int
    result: Task
    ranks: tuple[int, int] | None

    def delay(self, links: Transfer, table: CostTable) -> float:
        """Return how long the result is on its way, for a microbatch with these costs."""
        return 0.0 if self.ranks is None else links.time(*self.ranks, table.sent_bytes(self.result))


@dataclass(frozen=True, slots=True)
class _Planned:
    """A task of a step: whose time it takes, and the places of the tasks after which it starts."""

    task: Task
    before: int  # on its rank; -1: none
    reads: tuple[_Read, ...]


@lru_cache(maxsize=32)
def _plan(schedule: Schedule, num_microbatches: int) -> tuple[_Planned, ...]:
    """Return all tasks of a step in an order in which each comes after those that it reads."""
    lists, num_stages = task_lists(schedule, num_microbatches)
    planned: list[_Planned] = []
    last: dict[int, int] = {}
    makers: dict[Task, tuple[int, int]] = {}

    def plan(rank: int, task: Task, start: float, end: float) -> None:
        reads: list[_Read] = []
        for need in needs(task, num_stages):
            place, source = makers[need]
            reads.append(_Read(place, need, None if source == rank else (source, rank)))
        planned.append(_Planned(task, last.get(rank, -1), tuple(reads)))
        last[rank] = len(planned) - 1
        makers.update(dict.fromkeys(results(task), (last[rank], rank)))

    if blocked := advance(lists, num_stages, plan):
        raise deadlock_error(lists, blocked)
    return tuple(planned)


class _Step:
    """The simulation of one step with several kinds of microbatches: the times of `simulate`, without its events."""

    def __init__(
        self, planned: Sequence[_Planned], tables: Sequence[CostTable], transfer: Transfer | float | None
    ) -> None:
        self.tables = tables
        links = Transfer.of(transfer)
        self._rows: list[tuple[int, int, list[float], list[tuple[int, list[float]]]]] = []
        for each in planned:
            times = [table.duration(each.task) for table in tables]
            reads = [(read.maker, [read.delay(links, table) for table in tables]) for read in each.reads]
            self._rows.append((each.task.microbatch, each.before, times, reads))

    def seconds(self, kinds: Sequence[int]) -> float:
        """Return the time of a step whose microbatches are of these kinds, in this order."""
        ends = [0.0] * (len(self._rows) + 1)  # the last one is that before the first task: place -1
        for place, (microbatch, before, times, reads) in enumerate(self._rows):
            kind, start = kinds[microbatch], ends[before]
            for maker, delays in reads:
                arrived = ends[maker] + delays[kind]
                if arrived > start:
                    start = arrived
            ends[place] = start + times[kind]
        return max(ends)
