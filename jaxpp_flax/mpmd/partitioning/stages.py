"""Stages of a program, the order in which its schedule runs them on each mesh, and the halves of split backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpp_flax.engine.analyses.data_flow import split_backward
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.messages import listed
from jaxpp_flax.mpmd.config import MpmdConfig
from jaxpp_flax.mpmd.options import by_stages
from jaxpp_flax.mpmd.partitioning.nodes import Node
from jaxpp_flax.schedules import ScheduleError, merge_order
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import Task, TaskKind, flatten, parts

__all__ = ["Order", "Stages", "order_of", "split_nodes", "stages_of"]


@dataclass(frozen=True)
class Stages:
    """The stages of a program in the order of its data; `ranks` and `names` give the mesh and the names of each."""

    ranks: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    meshes: tuple[str, ...]

    @cached_property
    def of_name(self) -> dict[str, int]:
        """The stage of each name."""
        return {name: stage for stage, names in enumerate(self.names) for name in names}

    @cached_property
    def used_ranks(self) -> tuple[int, ...]:
        """The meshes that hold a stage, in the order of their first stage: the ranks of a schedule."""
        return tuple(dict.fromkeys(self.ranks))

    def describe(self, stage: int) -> str:
        """Describe a stage with its mesh and names, for messages."""
        names = self.names[stage]
        return f"stage {stage} ({listed(names, 3, str)}) on {self.meshes[self.ranks[stage]]!r}"


def stages_of(nodes: Sequence[Node], config: MpmdConfig) -> Stages:
    """Find the stages: names of one mesh that follow each other, or that share a stage number.

    Named computations of microbatches make stages; without these, all named computations.
    """
    named = [n for n in nodes if n.computation is not None and not n.backward]
    members: dict[tuple[int, int], list[str]] = {}
    seen: set[str] = set()
    run = 0
    last: tuple[int, int | None] | None = None
    for node in [n for n in named if n.call is not None] or named:
        name = node.computation
        if name is None or name in seen:
            continue
        seen.add(name)
        rank, number = config.rank_of(name), config.name_to_stage_assignment.get(name)
        if last != (rank, number):
            run += 1
        last = rank, number
        members.setdefault((rank, -run if number is None else number), []).append(name)
    return Stages(tuple(rank for rank, _ in members), tuple(map(tuple, members.values())), config.meshes.names)


@dataclass(frozen=True)
class Order:
    """Each mesh's tasks in order; `fused` tasks run as one program with their other half."""

    tasks: Mapping[int, tuple[Task, ...]]
    fused: frozenset[Task]
    name: str

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages whose backward runs in two halves."""
        tasks = (task for listed in self.tasks.values() for task in listed)
        return frozenset(task.stage for task in tasks if task.kind is TaskKind.BACKWARD_INPUT)


def order_of(schedule: str | Schedule, stages: Stages, num_microbatches: int) -> Order:
    """Return the order of a schedule's tasks; `schedule` may be a name of `PIPELINE_SCHEDULES`.

    Raises:
      ScheduleError: if the stages do not fit the schedule, or the schedule deadlocks.
    """
    of_stages = (
        by_stages(schedule, len(stages.ranks), len(stages.used_ranks)) if isinstance(schedule, str) else schedule
    )
    name = schedule if isinstance(schedule, str) else type(of_stages).__name__
    used = stages.used_ranks
    if (of_stages.num_stages, of_stages.num_ranks) != (len(stages.ranks), len(used)):
        raise ScheduleError(
            f"{name} is for {of_stages.num_stages} stages on {of_stages.num_ranks} meshes, but the program has "
            f"{len(stages.ranks)} stages on {len(used)}: {'; '.join(map(stages.describe, range(len(stages.ranks))))}. "
            "Assign neighbouring computations to one mesh, give them one number in name_to_stage_assignment, or use a "
            "schedule for these numbers, such as CIRCULAR or GPIPE."
        )
    for stage, rank in enumerate(stages.ranks):
        wanted = used[of_stages.rank_of(stage)]
        if rank != wanted:
            raise ScheduleError(
                f"the assignment does not fit {name}: it wants stage {stage} on mesh {stages.meshes[wanted]!r}, but "
                f"{stages.describe(stage)}. Assign its computations there, or join them with a neighbour in "
                "name_to_stage_assignment."
            )
    of_stages.check(num_microbatches)
    listed = of_stages.tasks(num_microbatches)
    merge_order(listed)  # refuses a schedule that deadlocks by itself
    pairs = [task for tasks in listed for task in tasks if task.kind is TaskKind.FUSED]
    return Order(
        {rank: tuple(flatten(tasks)) for rank, tasks in zip(used, listed, strict=True)},
        frozenset(task for pair in pairs for task in parts(pair)),
        name,
    )


def split_nodes(nodes: Sequence[Node], stages: Stages, order: Order) -> tuple[Node, ...]:
    """Split the backward computations for which the order has two halves."""
    leads = _leads_to_backward(nodes)
    halved: list[Node] = []
    for node in nodes:
        split = node.computation is not None and stages.of_name.get(node.computation) in order.split_stages
        if not (split and node.backward and node.call is not None):
            halved.append(node)
            continue
        halves = split_backward(node.equations, [v for v in node.outputs if (v, node.call) in leads])
        kinds = TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
        halved += [replace(node, equations=half, kind=kind) for half, kind in zip(halves, kinds, strict=True) if half]
    return tuple(halved)


def _leads_to_backward(nodes: Sequence[Node]) -> set[tuple[Value, int | None]]:
    """Find the values that lead, through unnamed work, to named backward work of a microbatch, with the microbatch.

    Accumulation takes a value into the next microbatch, which does not wait for it.
    """
    leads: set[tuple[Value, int | None]] = set()
    for node in reversed(nodes):
        unnamed = node.computation is None
        if any((v, node.call) in leads for v in node.outputs) if unnamed else node.backward:
            leads.update((value, node.call) for value in node.inputs)
    return leads
