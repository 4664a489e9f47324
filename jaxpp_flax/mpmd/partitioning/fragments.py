"""Join placed nodes to fragments, in an order that the schedule allows. One mesh runs a fragment as one program."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from jaxpp_flax.mpmd.partitioning.nodes import Node
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


@dataclass(eq=False, slots=True)
class Fragment:
    """Nodes that one mesh runs as one program."""

    key: Key
    nodes: list[Node] = field(default_factory=list)

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

    Raises:
      ScheduleError: if the program's data cannot follow the schedule.
    """
    walk = _Walk(nodes, stages, order)
    for node in walk.in_order():
        if node.computation is not None or node.call is None:
            walk.run(node)
    for node in nodes:  # what no named work reads or makes: sums that wait for other microbatches
        walk.run(node)
    return walk.fragments


class _Walk:
    """One walk over named work. It takes along what it reads, and then what follows from it in the same microbatch."""

    def __init__(self, nodes: Sequence[Node], stages: Stages, order: Order | None) -> None:
        self.stages, self.order = stages, order
        self.fragments: list[Fragment] = []
        self.place = {node: number for number, node in enumerate(nodes)}
        makers = {value: node for node in nodes for value in node.outputs}
        self.reads = {node: list(dict.fromkeys(makers[v] for v in node.inputs if v in makers)) for node in nodes}
        self.readers: dict[Node, list[Node]] = {node: [] for node in nodes}
        for node in nodes:
            for maker in self.reads[node]:
                self.readers[maker].append(node)
        self._of: dict[Node, int] = {}  # the number of each node's fragment
        self._begun: dict[Key, int] = {}
        self._latest: dict[int, int] = {}

    def in_order(self) -> list[Node]:
        """Sort the nodes: each mesh runs its tasks one after another; else they stay in order as far as data allows.

        A constant that microbatches read (zeros, indices) comes first, since it is made once.
        """
        sorter = TopologicalSorter(self.reads)
        for before, after in self._turns():
            sorter.add(after, *before)
        try:
            sorter.prepare()
        except CycleError as error:
            raise self._stuck(error.args[1]) from None
        ordered: list[Node] = []
        ready: list[tuple[bool, int, Node]] = []
        while sorter.is_active():
            for node in sorter.get_ready():
                is_last = bool(node.inputs) or node.call is not None or all(n.call is None for n in self.readers[node])
                heapq.heappush(ready, (is_last, self.place[node], node))
            ordered.append(heapq.heappop(ready)[-1])
            sorter.done(ordered[-1])
        return ordered

    def _turns(self) -> Iterator[tuple[list[Node], Node]]:
        """Yield each node of a task with the nodes of the task before it on its mesh."""
        nodes_of: dict[Task | None, list[Node]] = {}
        for node in self.place:
            nodes_of.setdefault(self._task(node), []).append(node)
        for tasks in () if self.order is None else self.order.tasks.values():
            for first, second in itertools.pairwise(task for task in tasks if task in nodes_of):
                yield from ((nodes_of[first], node) for node in nodes_of[second])

    def run(self, node: Node) -> None:
        """Run a node after what it reads; then the unnamed work of its microbatch that can follow."""
        if node in self._of:
            return
        key, work = self._key(node), _work(node)
        for each in self._missing(node):
            self._join(each, key if _work(each) == work else Key(each.rank, call=each.call))
        done = [node] if node.computation is not None and node.call is not None else []
        while done:
            for reader in self.readers[done.pop()]:
                missing = [] if reader in self._of else self._missing(reader)
                if missing and all(each.computation is None and _work(each) == work for each in missing):
                    for each in missing:
                        self._join(each, key)
                    done.append(reader)

    def _missing(self, node: Node) -> list[Node]:
        """Return a node and the unnamed work that it waits for, in program order; none if it waits for named work."""
        missing, left = {node}, [node]
        while left:
            for maker in self.reads[left.pop()]:
                if maker not in self._of and maker not in missing:
                    if maker.computation is not None:
                        return []
                    missing.add(maker)
                    left.append(maker)
        return sorted(missing, key=self.place.__getitem__)

    def _join(self, node: Node, key: Key) -> None:
        """Let a node join the fragment of its key if all that it reads was begun before that fragment; else begin one.

        So no data goes out of a fragment and comes back.
        """
        # Outside microbatches, all consecutive work of one mesh is one program.
        group = key if key.call is not None else Key(node.rank)
        number, latest = self._begun.get(group, -1), max((self._of[maker] for maker in self.reads[node]), default=0)
        if number < latest or (key.call is None and self._latest[node.rank] != number):
            number = self._begun[group] = self._latest[node.rank] = len(self.fragments)
            self.fragments.append(Fragment(key))
        fragment = self.fragments[number]
        if fragment.key.stage is None:
            fragment.key = key
        fragment.nodes.append(node)
        self._of[node] = number

    def _task(self, node: Node) -> Task | None:
        """Return the schedule's task for a node, if there is one."""
        stage = self.stages.of_name.get(node.computation or "")
        return None if stage is None or node.call is None else Task(node.kind, stage, node.call)

    def _key(self, node: Node) -> Key:
        if node.computation is None:
            return Key(node.rank, call=node.call)
        is_fused = self.order is not None and self._task(node) in self.order.fused  # both halves are one program
        kind = TaskKind.FUSED if is_fused else node.kind
        return Key(node.rank, self.stages.of_name.get(node.computation), kind, node.call)

    def _stuck(self, nodes: Sequence[Node]) -> ScheduleError:
        schedule = "" if self.order is None else self.order.name
        names = dict.fromkeys(f"{node.origin} ({self._task(node)!r})" for node in nodes if self._task(node))
        return ScheduleError(
            f"the program cannot run by {schedule}: its computations wait for each other in a circle: "
            f"{'; '.join([*names][:8])}. If a computation of an earlier stage reads what a later stage makes, assign "
            "both to one stage; else change the schedule."
        )


def _work(node: Node) -> tuple[int, int | None, bool]:
    """Return the mesh, the microbatch and the direction of a node."""
    return node.rank, node.call, node.backward
