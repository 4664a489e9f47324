"""Choose when the tasks of a loop gather their parameters: once, or once for each window of tasks under a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxpp_flax.engine.passes.fsdp.rule import Gather
from jaxpp_flax.engine.passes.loop.loop_tasks import LoopTask
from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.tracing.ir import Graph, Value, values

__all__ = ["fit_gathers", "plan_gathers"]


def fit_gathers(loop: Loop, limit: int | None) -> Loop:
    """Let the tasks of a stage gather by themselves what does not fit the limit, the smallest parameters first.

    A parameter that a stage gathers before its tasks is held by all of them. One that does not fit beside the others
    is gathered inside each task that reads it, as without the setting.
    """
    if limit is None or not loop.gathers:
        return loop
    part, tasks, shards = loop.partition, list(loop.partition.tasks), dict[Value, Value]()
    for stage in range(part.num_stages):
        of_stage = [i for i, task in enumerate(tasks) if task.stage == stage]
        inside = _too_large({v for i in of_stage for v in tasks[i].graph.inputs}, loop.gathers, limit)
        for value in inside:
            shards.setdefault(value, Value(values(loop.gathers[value].equation.inputs)[0].aval))
        for i in of_stage:
            tasks[i] = _gathering_inside(tasks[i], inside, loop.gathers, shards)
    operands = (*loop.operands, *(values(loop.gathers[v].equation.inputs)[0] for v in shards))
    part = replace(part, tasks=tuple(tasks), operands=(*part.operands, *shards.values()))
    return replace(loop, partition=part, operands=operands, gather_limit=limit)


def _too_large(read: set[Value], gathers: Mapping[Value, Gather], limit: int) -> list[Value]:
    """Return the gathered parameters of a stage that do not fit; the largest are kept, since they save the most."""
    total, left = 0, list[Value]()
    for value, gather in sorted(gathers.items(), key=lambda item: -item[1].nbytes):
        if value not in read:
            continue
        if total + gather.nbytes > limit:
            left.append(value)
        else:
            total += gather.nbytes
    return left


def _gathering_inside(
    task: LoopTask, inside: Iterable[Value], gathers: Mapping[Value, Gather], shards: Mapping[Value, Value]
) -> LoopTask:
    """Return a task that reads shards in place of gathered parameters, and gathers them itself."""
    graph, own = task.graph, [value for value in inside if value in task.graph.inputs]
    if not own:
        return task
    gathering = tuple(replace(gathers[value].equation, inputs=(shards[value],)) for value in own)
    inputs = tuple(shards[value] if value in own else value for value in graph.inputs)
    return replace(task, graph=Graph(inputs, graph.outputs, (*gathering, *graph.equations)))


def plan_gathers(loop: Loop, order: Sequence[int]) -> list[tuple[Value, ...]]:
    """Return, for each task that runs, the parameters to gather before it.

    Under a limit, a rank forgets gathered parameters that its next task does not read, until the new ones fit: the one
    that is read again last goes first, so that windows of consecutive tasks are as long as they can be.

    Args:
      loop: whose stages fit the limit, see `fit_gathers`.
      order: the indices of the tasks in the order in which they run.
    """
    rank_of = [loop.rank_of_task(task) for task in range(len(loop.partition.tasks))]
    reads = [tuple(v for v in task.graph.inputs if v in loop.gathers) for task in loop.partition.tasks]
    next_reads: dict[tuple[int, Value], list[int]] = {}
    for at in range(len(order) - 1, -1, -1):
        for value in reads[order[at]]:
            next_reads.setdefault((rank_of[order[at]], value), []).append(at)
    held: list[dict[Value, int]] = [{} for _ in range(loop.schedule.num_ranks)]
    found: list[tuple[Value, ...]] = []
    for task in order:
        rank, here = rank_of[task], held[rank_of[task]]
        new = tuple(value for value in reads[task] if value not in here)
        here.update((value, loop.gathers[value].nbytes) for value in new)
        idle = [value for value in here if value not in reads[task]]
        while new and loop.gather_limit is not None and sum(here.values()) > loop.gather_limit:
            # The list of a value's reads is reversed, so its end is the next one; a value without one goes first.
            last = max(idle, key=lambda value: (next_reads[rank, value] or [len(order)])[-1])
            idle.remove(last)
            del here[last]
        for value in reads[task]:
            next_reads[rank, value].pop()
        found.append(new)
    return found
