"""Join placed nodes to fragments, in an order that the schedule allows. One mesh runs a fragment as one program."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.mpmd.partitioning.nodes import Node, Origin
from jaxpp_flax.mpmd.partitioning.stages import Order, Stages
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["Fragment", "fragments_of"]


class Key(NamedTuple):
    """The work that may share a fragment: one microbatch's work of one stage in one direction."""

    rank: int
    stage: int | None = None
    kind: TaskKind | None = None
    call: int | None = None

    @property
    def task(self) -> Task | None:
        """The schedule's task for this work, if there is one."""
        if self.kind is None or self.stage is None or self.call is None:
            return None
        return Task(self.kind, self.stage, self.call)


@dataclass(eq=False, slots=True)
class Fragment:
    """Nodes that one mesh runs as one program.

    `reads` are the numbers of the fragments that make what it reads. `turn` is the position of the latest task on its
    mesh that it waits for, itself included.
    """

    key: Key
    nodes: list[Node] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    turn: int = -1

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The named computations in the fragment."""
        return tuple(dict.fromkeys(n.origin for n in self.nodes if n.origin is not None and n.computation is not None))

    @property
    def label(self) -> str:
        """The fragment's name in profiles and listings."""
        key = self.key
        if key.stage is None or key.kind is None:
            return "inferred"
        directions = dict.fromkeys("bwd" if node.backward else "fwd" for node in self.nodes)
        halves = {TaskKind.BACKWARD_INPUT: "bwd_i", TaskKind.BACKWARD_WEIGHT: "bwd_w"}
        return f"{halves.get(key.kind) or '_'.join(directions)}_{key.stage}"


def fragments_of(nodes: Sequence[Node], stages: Stages, order: Order | None) -> list[Fragment]:
    """Return the fragments of placed nodes in an order in which they can run: program order, as the schedule allows it.

    A node joins the fragment of its key if all that it reads was begun before that fragment. So no data goes out of a
    fragment and comes back. Unnamed work that waits for a later task of its mesh does not join an earlier one.

    Raises:
      ScheduleError: if the program's data cannot follow the schedule.
    """
    turns: Mapping[Task | None, int] = {} if order is None else order.turns
    fragments: list[Fragment] = []
    begun: dict[Key, int] = {}
    latest: dict[int, int] = {}
    makers: dict[Value, int] = {}  # the fragment that makes each value
    for node, key in _with_keys(nodes, stages, order):
        reads = {makers[value] for value in node.inputs if value in makers}
        turn = max((fragments[number].turn for number in reads if fragments[number].key.rank == node.rank), default=-1)
        if node.computation is None and turn > turns.get(key.task, turn):
            key = Key(node.rank, call=node.call)
        # Outside microbatches, all consecutive work of one mesh is one program.
        group = key if key.call is not None else Key(node.rank)
        number = begun.get(group, -1)
        if number < max(reads, default=0) or (key.call is None and latest[node.rank] != number):
            number = begun[group] = latest[node.rank] = len(fragments)
            fragments.append(Fragment(key))
        fragment = fragments[number]
        if fragment.key.stage is None:
            fragment.key = key
        fragment.nodes.append(node)
        fragment.reads |= reads - {number}
        fragment.turn = max(fragment.turn, turn, turns.get(key.task, -1))
        makers.update(dict.fromkeys(node.outputs, number))
    return fragments if order is None else _scheduled(fragments, order)


def _with_keys(nodes: Sequence[Node], stages: Stages, order: Order | None) -> list[tuple[Node, Key]]:
    """Return each node with its key, in program order but for three kinds of unnamed work.

    A microbatch's unnamed work goes with the named work of its rank that it reads; else with the named work that reads
    it, just before that. Constants that microbatches read (zeros, indices) come first, since they are made once.
    """
    place = {node: number for number, node in enumerate(nodes)}
    keys: dict[Node, Key] = {}
    makers: dict[Value, Node] = {}
    readers: dict[Node, list[Node]] = {node: [] for node in nodes}

    def adopted(node: Node, others: Iterable[Node]) -> Key | None:
        """Return the key of the first of the others that is of the same rank, microbatch and direction."""
        work = node.rank, node.call, node.backward
        return next((keys[o] for o in others if o in keys and (o.rank, o.call, o.backward) == work), None)

    for node in nodes:
        makers.update(dict.fromkeys(node.outputs, node))
        before = sorted({makers[v] for v in node.inputs if v in makers}, key=place.__getitem__, reverse=True)
        for maker in before:
            readers[maker].append(node)
        if node.computation is not None:
            keys[node] = _key(node, stages, order)
        elif node.call is not None and (key := adopted(node, before)) is not None:
            keys[node] = key
    earliest = dict(place)
    for node in reversed(nodes):
        if node in keys:
            continue
        after = readers[node]
        key = None if node.call is None else adopted(node, after)
        keys[node] = key or Key(node.rank, call=node.call)
        if key is not None:
            earliest[node] = min(earliest[other] for other in after)
        elif node.call is None and not node.inputs and any(other.call is not None for other in after):
            earliest[node] = -1
    return [(node, keys[node]) for node in sorted(nodes, key=lambda node: (earliest[node], place[node]))]


def _key(node: Node, stages: Stages, order: Order | None) -> Key:
    key = Key(node.rank, stages.of_name.get(node.computation or ""), node.kind, node.call)
    if order is not None and key.task in order.fused:
        return key._replace(kind=TaskKind.FORWARD)  # both halves are one program
    return key


def _scheduled(fragments: Sequence[Fragment], order: Order) -> list[Fragment]:
    """Sort the fragments: each mesh runs its tasks one after another; else they stay in order as far as data allows."""
    before = [set(fragment.reads) for fragment in fragments]
    of_task: dict[Task, list[int]] = {}
    for number, fragment in enumerate(fragments):
        if fragment.key.task is not None and fragment.origins:
            of_task.setdefault(fragment.key.task, []).append(number)
    for tasks in order.tasks.values():
        for first, second in itertools.pairwise(task for task in tasks if task in of_task):
            for number in of_task[second]:
                before[number].update(of_task[first])
    found: dict[int, None] = {}
    waiting = list(range(len(fragments)))
    while waiting:
        for number in waiting:
            if before[number] <= found.keys():
                found[number] = None
        left = [number for number in waiting if number not in found]
        if len(left) == len(waiting):
            raise _stuck([fragments[number] for number in left], order.name)
        waiting = left
    return [fragments[number] for number in found]


def _stuck(fragments: Sequence[Fragment], schedule: str) -> ScheduleError:
    names = dict.fromkeys(f"{', '.join(map(str, f.origins))} ({f.key.task!r})" for f in fragments if f.origins)
    return ScheduleError(
        f"the program cannot run by {schedule}: its computations wait for each other in a circle: "
        f"{'; '.join([*names][:8])}. If a computation of an earlier stage reads what a later stage makes, assign both "
        "to one stage; else change the schedule."
    )
