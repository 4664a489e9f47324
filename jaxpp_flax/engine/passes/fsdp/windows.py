"""Choose when the tasks of a loop gather their parameters: once, or once for each window of tasks under a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxpp_flax.engine.passes.fsdp.rule import Gather
from jaxpp_flax.engine.passes.loop.loop_tasks import LoopTask
from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.tracing.ir import Graph, Value, values
from jaxpp_flax.schedules.gathers import gathered_inside, gathers_before

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
        read = {v for i in of_stage for v in tasks[i].graph.inputs}
        inside = gathered_inside({v: float(g.nbytes) for v, g in loop.gathers.items() if v in read}, limit)
        for value in inside:
            shards.setdefault(value, Value(values(loop.gathers[value].equation.inputs)[0].aval))
        for i in of_stage:
            tasks[i] = _gathering_inside(tasks[i], inside, loop.gathers, shards)
    operands = (*loop.operands, *(values(loop.gathers[v].equation.inputs)[0] for v in shards))
    part = replace(part, tasks=tuple(tasks), operands=(*part.operands, *shards.values()))
    return replace(loop, partition=part, operands=operands, gather_limit=limit)


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

    Each rank follows `gathers_before`.

    Args:
      loop: whose stages fit the limit, see `fit_gathers`.
      order: the indices of the tasks in the order in which they run.
    """
    rank_of = [loop.rank_of_task(task) for task in range(len(loop.partition.tasks))]
    reads = [tuple(v for v in task.graph.inputs if v in loop.gathers) for task in loop.partition.tasks]
    sizes = {value: float(gather.nbytes) for value, gather in loop.gathers.items()}
    found: list[tuple[Value, ...]] = [()] * len(order)
    for rank in range(loop.schedule.num_ranks):
        own = [at for at, task in enumerate(order) if rank_of[task] == rank]
        gathered = gathers_before([reads[order[at]] for at in own], sizes, loop.gather_limit)
        for at, some in zip(own, gathered, strict=True):
            found[at] = some
    return found
