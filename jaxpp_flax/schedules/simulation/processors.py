"""The simulator's loop for ranks that share processors: virtual devices on one machine's cores.

:func:`progress.advance` gives every rank a processor of its own, as hardware does. On a machine with
fewer cores than ranks a task that could run may have to wait for a core.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from jaxpp_flax.schedules.dependencies import needs, results
from jaxpp_flax.schedules.progress import Blocked
from jaxpp_flax.schedules.task import AnyTask, Task


def advance_on(
    processors: int,
    ranks: Iterable[Iterator[AnyTask]],
    num_stages: int,
    emit: Callable[[int, AnyTask, float, float], None],
    *,
    duration: Callable[[AnyTask], float],
    delay: Callable[[int, int, Task], float] | None = None,
) -> list[Blocked]:
    """Run every rank as far as it will go, at most ``processors`` tasks at a time; return the ranks that are stuck.

    A task holds one processor from start to end. The task that has been ready longest gets the next
    free one (Graham's list scheduling), which is what a thread pool with one queue does. The other
    arguments are those of :func:`progress.advance`, ``duration`` the time of a task; calls of
    ``emit`` are in order of readiness.
    """
    iterators = list(ranks)
    heads = [next(iterator, None) for iterator in iterators]
    positions = [0] * len(heads)
    free = [0.0] * len(heads)
    made: dict[Task, tuple[float, int]] = {}
    waiting: dict[Task, set[int]] = {}
    ready: list[tuple[float, int]] = []
    cores = [0.0] * processors

    def admit(rank: int) -> Task | None:
        """Queue the rank's next task if its inputs exist; else return the task that it waits for."""
        task = heads[rank]
        if task is None:
            return None
        time = free[rank]
        for need in needs(task, num_stages):
            if need not in made:
                waiting.setdefault(need, set()).add(rank)
                return need
            end, source = made[need]
            time = max(time, end if delay is None or source == rank else end + delay(source, rank, need))
        heapq.heappush(ready, (time, rank))
        return None

    for rank in range(len(heads)):
        admit(rank)
    while ready:
        time, rank = heapq.heappop(ready)
        task = heads[rank]
        if task is None:
            continue
        start = max(time, heapq.heappop(cores))
        end = start + duration(task)
        heapq.heappush(cores, end)
        emit(rank, task, start, end)
        free[rank] = end
        heads[rank] = next(iterators[rank], None)
        positions[rank] += 1
        woken = {rank}
        for result in results(task):
            made[result] = (end, rank)
            woken |= waiting.pop(result, set())
        for one in sorted(woken):
            admit(one)
    blocked: list[Blocked] = []
    for rank, task in enumerate(heads):
        awaits = admit(rank) if task is not None else None
        if task is not None and awaits is not None:
            blocked.append(Blocked(rank, positions[rank], task, awaits))
    return blocked
