"""Stages of a program, the order in which its schedule runs them on each mesh, and the halves of split backwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.messages import listed
from jaxpp_flax.mpmd.partitioning.nodes import Node
from jaxpp_flax.schedules import (
    Circular,
    CircularReversed,
    GPipe,
    GPipe1F1BLast,
    InterleavedGPipe,
    ScheduleError,
    Std1F1B,
    ZeroBubble,
    ZeroBubbleH2,
    merge_order,
)
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["Order", "Stages", "order_of", "split_backward", "stages_of"]


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


def stages_of(
    nodes: Sequence[Node], ranks: Mapping[Node, int], given: Mapping[str, int], meshes: Sequence[str]
) -> Stages:
    """Find the stages: names of one mesh that follow each other, or that share a stage number.

    Named computations of microbatches make stages; without these, all named computations. `given` holds stage numbers.
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
        number = given.get(name)
        if last != (ranks[node], number):
            run += 1
        last = ranks[node], number
        members.setdefault((ranks[node], -run if number is None else number), []).append(name)
    return Stages(tuple(rank for rank, _ in members), tuple(map(tuple, members.values())), tuple(meshes))


@dataclass(frozen=True)
class Order:
    """Each mesh's tasks in order, and each task's position in a global order that keeps no mesh waiting."""

    tasks: Mapping[int, tuple[Task, ...]]
    position: Mapping[Task, int]
    fused: frozenset[Task]
    split_stages: frozenset[int]
    name: str


def _wraps_around(stages: Stages, num_microbatches: int) -> Order:
    """Make the order in which microbatch i enters at stage i; each stage first takes the nearest one before it."""
    tasks: dict[int, list[Task]] = {}
    for stage, rank in enumerate(stages.ranks):
        calls = [*range(min(stage, num_microbatches - 1), -1, -1), *range(num_microbatches - 1, stage, -1)]
        tasks.setdefault(rank, []).extend(Task(TaskKind.FORWARD, stage, m) for m in calls)
    ordered = {rank: tuple(listed) for rank, listed in tasks.items()}
    longest = max(map(len, ordered.values()))
    flat = [listed[k] for k in range(longest) for listed in ordered.values() if k < len(listed)]
    return Order(ordered, {t: k for k, t in enumerate(flat)}, frozenset(), frozenset(), _WRAP_AROUND)


_WRAP_AROUND = "PARALLEL_PIPELINES_WITH_WRAP_AROUND"
_ONE_STAGE_EACH = {
    "ONE_FWD_ONE_BWD": Std1F1B,
    "GPIPE_BUT_1F1B_FOR_LAST_MESH": GPipe1F1BLast,
    "ZERO_BUBBLE_H1": ZeroBubble,
    "ZERO_BUBBLE_H2_ZERO_TX_LATENCY": ZeroBubbleH2,
    "ZERO_BUBBLE_H2_HALF_TX_LATENCY": lambda n: ZeroBubbleH2(n, latency=0.5),
    "ZERO_BUBBLE_H2_FULL_TX_LATENCY": lambda n: ZeroBubbleH2(n, latency=1.0),
}
_DEALT_OUT = {"CIRCULAR": Circular, "CIRCULAR_WITH_REVERSED_BACKWARD": CircularReversed}


def _schedule(name: str, stages: Stages) -> Schedule:
    num_stages, num_ranks = len(stages.ranks), len(stages.used_ranks)
    if name in _DEALT_OUT:
        return _DEALT_OUT[name](num_stages, num_ranks)
    if name == "GPIPE":
        return GPipe(num_stages) if num_stages == num_ranks else InterleavedGPipe(num_stages, num_ranks)
    if num_stages != num_ranks:
        rank = next(r for r in stages.used_ranks if stages.ranks.count(r) > 1)
        held = [s for s, r in enumerate(stages.ranks) if r == rank]
        raise ScheduleError(
            f"{name} runs one stage on each mesh, but mesh {stages.meshes[rank]!r} holds {len(held)}: "
            f"{'; '.join(stages.describe(s) for s in held[:3])}. Assign neighbouring computations to one mesh, give "
            "them one number in name_to_stage_assignment, or use CIRCULAR or GPIPE."
        )
    return _ONE_STAGE_EACH[name](num_stages)


def order_of(schedule: str | Schedule, stages: Stages, num_microbatches: int, *, forward_only: bool) -> Order:
    """Return the order of a schedule's tasks; `schedule` may be a name of `PIPELINE_SCHEDULES`.

    Raises:
      ScheduleError: if the stages do not fit the schedule, or the schedule deadlocks.
    """
    if schedule == _WRAP_AROUND:
        if not forward_only:
            raise ScheduleError(
                f"{_WRAP_AROUND} runs forward passes alone, but the program differentiates its named computations. "
                "Use ONE_FWD_ONE_BWD or another schedule for training."
            )
        return _wraps_around(stages, num_microbatches)
    made = _schedule(schedule, stages) if isinstance(schedule, str) else schedule
    name = schedule if isinstance(schedule, str) else type(made).__name__
    used = stages.used_ranks
    if (made.num_stages, made.num_ranks) != (len(stages.ranks), len(used)):
        raise ScheduleError(
            f"{name} is for {made.num_stages} stages on {made.num_ranks} meshes, but the program has "
            f"{len(stages.ranks)} stages on {len(used)}: {'; '.join(map(stages.describe, range(len(stages.ranks))))}. "
            "Change the assignment, or make the schedule for these numbers."
        )
    for stage, rank in enumerate(stages.ranks):
        wanted = used[made.rank_of(stage)]
        if rank != wanted:
            raise ScheduleError(
                f"the assignment does not fit {name}: it wants stage {stage} on mesh {stages.meshes[wanted]!r}, but "
                f"{stages.describe(stage)}. Assign its computations there, or join them with a neighbour in "
                "name_to_stage_assignment."
            )
    made.check(num_microbatches)
    merged = merge_order(made.tasks(num_microbatches))
    tasks: dict[int, list[Task]] = {}
    fused: set[Task] = set()
    flat: list[Task] = []
    for rank, task in merged:
        parts = (task.forward, task.backward) if isinstance(task, FusedTask) else (task,)
        tasks.setdefault(used[rank], []).extend(parts)
        fused.update(parts if isinstance(task, FusedTask) else ())
        flat.extend(parts)
    split = {t.stage for t in flat if t.kind is TaskKind.BACKWARD_INPUT}
    return Order(
        {rank: tuple(listed) for rank, listed in tasks.items()},
        {task: k for k, task in enumerate(flat)},
        frozenset(fused),
        frozenset(split),
        name,
    )


def split_backward(
    nodes: Sequence[Node], stage_of: Mapping[str, int], stages: Collection[int]
) -> tuple[tuple[Node, ...], dict[Node, Node], frozenset[Node]]:
    """Split the backward computations of some stages; `stage_of` gives the stage of each name.

    Returns:
      All nodes; the original node of each half; and the nodes that hold only weight gradients.
    """
    leads = _leads_to_backward(nodes)
    found: list[Node] = []
    halves: dict[Node, Node] = {}
    weights: set[Node] = set()
    for node in nodes:
        name = node.computation
        if name is None or not node.backward or node.call is None or stage_of.get(name) not in stages:
            found.append(node)
            continue
        needed = makers_of(node.equations, leads.intersection(node.outputs))
        for late in (False, True):
            if equations := tuple(e for e in node.equations if (e not in needed) == late):
                half = node.with_equations(equations)
                halves[half] = node
                found.append(half)
                if late:
                    weights.add(half)
    return tuple(found), halves, frozenset(weights)


def _leads_to_backward(nodes: Sequence[Node]) -> set[Value]:
    """Find the values that lead, through unnamed work, to named backward work of the same microbatch."""
    leads: dict[Value, set[int | None]] = {}
    for node in reversed(nodes):
        if node.computation is not None:
            calls = {node.call} if node.backward else set[int | None]()
        else:
            calls = set[int | None]().union(*(leads.get(v, set()) for v in node.outputs))
            # Accumulation takes a value into the next microbatch, which does not wait for it.
            calls &= {node.call}
        for value in node.inputs:
            leads.setdefault(value, set()).update(calls)
    maker = {v: node for node in nodes for v in node.outputs}
    return {v for v, calls in leads.items() if v in maker and maker[v].call in calls}
