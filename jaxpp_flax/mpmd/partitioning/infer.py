"""Place the nodes of a step on meshes: named nodes as assigned, the rest so that few bytes are transferred.

A value is sent once to each mesh that reads it and does not make it. To place the unnamed work with the fewest bytes
is a multiway cut: no fast exact method is known for three meshes or more. So the search begins with a placement that
follows the data. It moves single nodes, pairs and connected regions, until no move helps. Small regions are searched
exhaustively, regions of middle size from several first placements.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpp_flax.engine.tracing.ir import Value, values
from jaxpp_flax.mpmd.partitioning.nodes import Node, Step

__all__ = ["Placement", "infer"]

_SCALAR_BYTES = 64  # step counters, learning rates, keys: cheaper to compute on each mesh than to send
_EXHAUSTIVE = 4096  # assignments of one region that are all tried
_MAX_SWEEPS = 20
_RESTARTED = 100  # nodes of a region up to which other first placements are tried
_RANDOM_STARTS = 20


@dataclass(frozen=True)
class Placement:
    """The ranks of all nodes, arguments and results.

    `nodes` gives the ranks on which a node runs: one, or several if the node is computed on every rank that reads it.
    `arguments` and `results` give ranks; a captured constant is on every rank that reads it.
    """

    nodes: Mapping[Node, tuple[int, ...]]
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    transferred: int


@dataclass
class _Search:
    """The current placement of single nodes, and the bytes sent of each value."""

    step: Step
    rank: dict[Node, int]
    fixed_arguments: Mapping[Value, int]
    copied: set[Value]  # constants, and values computed on every rank that reads them: never sent
    producer: dict[Value, Node] = field(default_factory=dict)
    consumers: dict[Value, list[Node]] = field(default_factory=dict)
    readers: dict[Value, Counter[int]] = field(default_factory=dict)

    def cost_of(self, value: Value) -> int:
        """Return the bytes sent of one value."""
        readers = self.readers.get(value)
        if value in self.copied or not readers:
            return 0
        producer = self.producer.get(value)
        home = self.fixed_arguments.get(value) if producer is None else self.rank.get(producer)
        there = sum(count > 0 for count in readers.values())
        if home is None:
            return value.nbytes * (there - 1 if producer is None else 0)
        return value.nbytes * (there - (readers[home] > 0))

    def cost_around(self, nodes: Iterable[Node]) -> int:
        """Return the bytes sent of all values that touch the nodes."""
        return sum(map(self.cost_of, {v for node in nodes for v in (*node.inputs, *node.outputs)}))

    def put(self, node: Node, rank: int) -> None:
        """Move a node, or place it for the first time."""
        before = self.rank.get(node)
        for value in node.inputs:
            readers = self.readers.setdefault(value, Counter())
            if before is not None:
                readers[before] -= 1
            readers[rank] += 1
        self.rank[node] = rank

    def neighbours(self, node: Node) -> set[int]:
        """Return the ranks that hold the node's inputs, or read its outputs."""
        found: set[int] = set()
        for value in node.inputs:
            if value in self.copied:
                continue
            if (home := self._home(value)) is not None:
                found.add(home)
            elif value not in self.producer:  # an argument lives on the ranks of its other readers
                found.update(r for r, count in self.readers.get(value, Counter()).items() if count > 0)
        for value in node.outputs:
            found.update(r for r, count in self.readers.get(value, Counter()).items() if count > 0)
        return found

    def _home(self, value: Value) -> int | None:
        producer = self.producer.get(value)
        return self.fixed_arguments.get(value) if producer is None else self.rank.get(producer)

    def best_move(self, nodes: Sequence[Node], ranks: Iterable[int]) -> bool:
        """Move nodes together to the cheapest of `ranks`, if that saves bytes."""
        before = [self.rank[node] for node in nodes]
        cost = start = self.cost_around(nodes)
        best: int | None = None
        for rank in sorted(ranks):
            for node in nodes:
                self.put(node, rank)
            if (found := self.cost_around(nodes)) < cost:
                cost, best = found, rank
        for node, old in zip(nodes, before, strict=True):
            self.put(node, old if best is None else best)
        return cost < start


def _copied(step: Step, fixed: Mapping[Node, int], constants: Iterable[Value]) -> set[Node]:
    """Find the nodes that run on every rank that reads them: no operands, or small ones that read arguments only."""
    known: set[Value] = {*step.inputs, *constants}
    found: set[Node] = set()
    for node in step.nodes:
        if node in fixed or any(e.effects for e in node.equations):
            continue
        small = all(v.nbytes <= _SCALAR_BYTES for v in (*node.inputs, *node.outputs))
        if not node.inputs or (small and known.issuperset(node.inputs)):
            found.add(node)
            known.update(v for v in node.outputs if v.nbytes <= _SCALAR_BYTES)
    return found


def infer(
    step: Step,
    fixed: Mapping[Node, int],
    constants: frozenset[Value],
    argument_ranks: Mapping[Value, int],
    result_ranks: Sequence[int | None],
) -> Placement:
    """Place the nodes that are not fixed.

    Args:
      step: the step as nodes.
      fixed: the ranks of named nodes.
      constants: the inputs that are captured arrays: a copy on every rank costs nothing per step.
      argument_ranks: the ranks of arguments, if given.
      result_ranks: for each result, its rank, or None if no rank is given.
    """
    copied = _copied(step, fixed, constants)
    search = _Search(step, {}, argument_ranks, {*constants, *(v for n in copied for v in n.outputs)})
    for node in step.nodes:
        search.producer.update(dict.fromkeys(node.outputs, node))
        for value in node.inputs:
            search.consumers.setdefault(value, []).append(node)
    for atom, rank in zip(step.outputs, result_ranks, strict=True):
        if isinstance(atom, Value) and rank is not None:
            search.readers.setdefault(atom, Counter())[rank] += 1
    for node, rank in fixed.items():
        search.put(node, rank)
    free = [node for node in step.nodes if node not in fixed and node not in copied]
    _follow_data(search, free)
    _improve(search, free)
    return _finish(search, copied, constants, argument_ranks, result_ranks)


def _follow_data(search: _Search, free: Sequence[Node]) -> None:
    """Make a first placement: on the rank that holds most of a node's inputs, else that reads most of its outputs."""
    waiting: list[Node] = []
    for node in free:
        held: Counter[int] = Counter()
        for value in node.inputs:
            if value in search.copied:
                continue
            producer = search.producer.get(value)
            if producer is not None:
                if producer in search.rank:
                    held[search.rank[producer]] += value.nbytes + 1
            elif value in search.fixed_arguments:
                held[search.fixed_arguments[value]] += value.nbytes + 1
            else:
                for rank, count in search.readers.get(value, Counter()).items():
                    if count > 0:
                        held[rank] += value.nbytes + 1
        if held:
            search.put(node, min(held, key=lambda r: (-held[r], r)))
        else:
            waiting.append(node)
    for node in reversed(waiting):
        wanted: Counter[int] = Counter()
        for value in node.outputs:
            for rank, count in search.readers.get(value, Counter()).items():
                if count > 0:
                    wanted[rank] += value.nbytes + 1
        search.put(node, min(wanted, key=lambda r: (-wanted[r], r)) if wanted else 0)


def _regions(search: _Search, free: Sequence[Node], *, same_rank: bool) -> list[list[Node]]:
    """Find regions of free nodes connected by values, or by arguments without a given rank; on one rank or on any."""
    members = set(free)
    seen: set[Node] = set()
    regions: list[list[Node]] = []
    for start in free:
        if start in seen:
            continue
        seen.add(start)
        region, stack = [], [start]
        while stack:
            node = stack.pop()
            region.append(node)
            around = [search.producer[v] for v in node.inputs if v in search.producer]
            shared = [v for v in node.inputs if v not in search.producer and v not in search.fixed_arguments]
            around += [c for v in (*node.outputs, *shared) for c in search.consumers.get(v, ())]
            for other in around:
                apart = same_rank and search.rank[other] != search.rank[node] if other in members else True
                if not apart and other not in seen:
                    seen.add(other)
                    stack.append(other)
        regions.append(region)
    return regions


def _improve(search: _Search, free: Sequence[Node]) -> None:
    _descend(search, free)
    for _ in range(_MAX_SWEEPS):
        before = search.cost_around(free)
        for region in _regions(search, free, same_rank=False):
            ranks = sorted(set[int]().union(*map(search.neighbours, region)))
            if len(ranks) > 1 and len(ranks) ** len(region) <= _EXHAUSTIVE:
                _exhaust(search, region, ranks)
            elif len(ranks) > 1 and len(region) <= _RESTARTED:
                _restart(search, region, ranks)
        if search.cost_around(free) == before:  # regions share arguments
            break


def _descend(search: _Search, free: Sequence[Node]) -> None:
    """Move single nodes, pairs and regions, until no move saves bytes."""
    members = set(free)
    for _ in range(_MAX_SWEEPS):
        improved = False
        for node in free:
            ranks = search.neighbours(node) - {search.rank[node]}
            improved |= bool(ranks) and search.best_move([node], ranks)
        for node in free:
            for other in {c for v in node.outputs for c in search.consumers.get(v, ()) if c in members}:
                ranks = search.neighbours(node) | search.neighbours(other)
                improved |= search.best_move([node, other], ranks)
        for region in _regions(search, free, same_rank=True):
            ranks = set[int]().union(*map(search.neighbours, region)) - {search.rank[region[0]]}
            improved |= len(region) > 2 and bool(ranks) and search.best_move(region, ranks)
        if not improved:
            break


def _restart(search: _Search, region: Sequence[Node], ranks: Sequence[int]) -> None:
    """Descend from other placements: all of a region on one rank, and some drawn at random (always the same)."""
    best = [search.rank[node] for node in region]
    cost = search.cost_around(region)
    draw = random.Random(0)
    starts = [[rank] * len(region) for rank in ranks]
    starts += [[draw.choice(ranks) for _ in region] for _ in range(_RANDOM_STARTS)]
    for start in starts:
        for node, rank in zip(region, start, strict=True):
            search.put(node, rank)
        _descend(search, region)
        if (found := search.cost_around(region)) < cost:
            best, cost = [search.rank[node] for node in region], found
    for node, rank in zip(region, best, strict=True):
        search.put(node, rank)


def _exhaust(search: _Search, region: Sequence[Node], ranks: Sequence[int]) -> None:
    """Try every placement of a small region."""
    best = [search.rank[node] for node in region]
    cost = search.cost_around(region)
    for candidate in itertools.product(ranks, repeat=len(region)):
        for node, rank in zip(region, candidate, strict=True):
            search.put(node, rank)
        if (found := search.cost_around(region)) < cost:
            best, cost = list(candidate), found
    for node, rank in zip(region, best, strict=True):
        search.put(node, rank)


def _finish(
    search: _Search,
    copied: set[Node],
    constants: frozenset[Value],
    argument_ranks: Mapping[Value, int],
    result_ranks: Sequence[int | None],
) -> Placement:
    step = search.step
    need: dict[Value, set[int]] = {}
    for atom, rank in zip(step.outputs, result_ranks, strict=True):
        if isinstance(atom, Value) and rank is not None:
            need.setdefault(atom, set()).add(rank)
    results = set(values(step.outputs))
    nodes: dict[Node, tuple[int, ...]] = {}
    for node in reversed(step.nodes):
        if node in copied:
            ranks = set[int]().union(*(need.get(v, set()) for v in node.outputs))
            if not ranks and results.intersection(node.outputs):
                ranks = {_default_rank(node, search, argument_ranks)}
        else:
            ranks = {search.rank[node]}
        nodes[node] = tuple(sorted(ranks))
        for value in node.inputs:
            need.setdefault(value, set()).update(ranks)
    arguments = tuple(
        tuple(sorted(need.get(v, ()))) if v in constants else (_home(v, search, need, argument_ranks),)
        for v in step.inputs
    )
    homes = dict(zip(step.inputs, arguments, strict=True))
    native = {v: ranks for node, ranks in nodes.items() for v in node.outputs}
    found = [
        min(native.get(atom) or homes.get(atom) or (0,)) if rank is None and isinstance(atom, Value) else rank or 0
        for atom, rank in zip(step.outputs, result_ranks, strict=True)
    ]
    sent = sum(v.nbytes * len(ranks - set(native.get(v) or homes.get(v) or ())) for v, ranks in need.items())
    return Placement({node: nodes[node] for node in step.nodes}, arguments, tuple(found), sent)


def _default_rank(node: Node, search: _Search, argument_ranks: Mapping[Value, int]) -> int:
    return next((argument_ranks[v] for v in node.inputs if v in argument_ranks), 0)


def _home(value: Value, search: _Search, need: Mapping[Value, set[int]], argument_ranks: Mapping[Value, int]) -> int:
    """Return an argument's rank: the rank that updates it, so that the next step finds it there; else a reader's."""
    if value in argument_ranks:
        return argument_ranks[value]
    updating = [
        search.rank[node]
        for node in search.consumers.get(value, ())
        if node.origin is None and node.call is None and node in search.rank
    ]
    return min(updating or need.get(value) or {0})
