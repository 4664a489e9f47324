"""Place the nodes of a step on meshes: named nodes as assigned, the rest so that few bytes are transferred.

A value is sent once to each mesh that reads it and does not make it. To place the unnamed work with the fewest bytes
is a multiway cut: no fast exact method is known for three meshes or more. So the search begins with a placement that
follows the data. It moves single nodes, and nodes with the work around them, until no move saves bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpp_flax.engine.tracing.ir import Value, values
from jaxpp_flax.mpmd.partitioning.nodes import Node, Step

__all__ = ["Placement", "infer"]

_SCALAR_BYTES = 64  # step counters, learning rates, keys: cheaper to compute on each mesh than to send
_MAX_GROUP = 16  # nodes that are moved together
_MAX_SWEEPS = 20


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

    def home(self, value: Value) -> int | None:
        """Return the rank that makes a value, or that was given to an argument; None if it is not known."""
        producer = self.producer.get(value)
        return self.fixed_arguments.get(value) if producer is None else self.rank.get(producer)

    def readers_of(self, value: Value) -> list[int]:
        """Return the ranks that read a value."""
        return [rank for rank, count in self.readers.get(value, Counter()).items() if count > 0]

    def cost_of(self, value: Value) -> int:
        """Return the bytes sent of one value."""
        there = self.readers_of(value)
        if value in self.copied or not there:
            return 0
        home = self.home(value)
        if home is None:
            return value.nbytes * (0 if value in self.producer else len(there) - 1)
        return value.nbytes * (len(there) - (home in there))

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

    def put_all(self, nodes: Sequence[Node], ranks: Sequence[int]) -> None:
        """Move each node to its rank."""
        for node, rank in zip(nodes, ranks, strict=True):
            self.put(node, rank)

    def holding(self, node: Node) -> Counter[int]:
        """Return the bytes of the node's inputs on each rank; a free argument is on all ranks that read it."""
        found: Counter[int] = Counter()
        for value in node.inputs:
            home = self.home(value)
            if value in self.copied or (home is None and value in self.producer):
                continue
            for rank in self.readers_of(value) if home is None else [home]:
                found[rank] += value.nbytes + 1
        return found

    def reading(self, node: Node) -> Counter[int]:
        """Return the bytes of the node's outputs that each rank reads."""
        found: Counter[int] = Counter()
        for value in node.outputs:
            for rank in self.readers_of(value):
                found[rank] += value.nbytes + 1
        return found

    def neighbours(self, node: Node) -> set[int]:
        """Return the ranks that hold the node's inputs, or read its outputs."""
        return {*self.holding(node), *self.reading(node)}

    def best_move(self, nodes: Sequence[Node], ranks: Iterable[int]) -> bool:
        """Move nodes together to the cheapest of `ranks`, if that saves bytes."""
        before = [self.rank[node] for node in nodes]
        cost = start = self.cost_around(nodes)
        best: int | None = None
        for rank in sorted(ranks):
            self.put_all(nodes, [rank] * len(nodes))
            if (found := self.cost_around(nodes)) < cost:
                cost, best = found, rank
        self.put_all(nodes, before if best is None else [best] * len(nodes))
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
    *,
    mixed_results: int | None = None,
) -> Placement:
    """Place the nodes that are not fixed.

    `constants` are the inputs that are captured arrays: a copy on every rank costs nothing per step. `argument_ranks`
    and `result_ranks` hold the ranks that the user gave. `mixed_results` is the rank of results that unnamed work makes
    from several ranks; None places them so that few bytes are transferred.
    """
    if mixed_results is not None:
        mixed = _mixed(step, fixed, argument_ranks)
        result_ranks = [
            mixed_results if rank is None and atom in mixed else rank
            for atom, rank in zip(step.outputs, result_ranks, strict=True)
        ]
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
    return _finish(search, copied, constants, result_ranks)


def _mixed(step: Step, fixed: Mapping[Node, int], argument_ranks: Mapping[Value, int]) -> set[Value]:
    """Find the values that unnamed work makes from several ranks."""
    origins = {value: {rank} for value, rank in argument_ranks.items()}
    for node in step.nodes:
        found = {fixed[node]} if node in fixed else set[int]().union(*(origins.get(v, set()) for v in node.inputs))
        origins.update(dict.fromkeys(node.outputs, found))
    return {value for value, ranks in origins.items() if len(ranks) > 1}


def _follow_data(search: _Search, free: Sequence[Node]) -> None:
    """Make a first placement: on the rank that holds most of a node's inputs, else that reads most of its outputs."""

    def put(node: Node, weights: Counter[int]) -> None:
        search.put(node, min(weights, key=lambda rank: (-weights[rank], rank), default=0))

    waiting: list[Node] = []
    for node in free:
        if held := search.holding(node):
            put(node, held)
        else:
            waiting.append(node)
    for node in reversed(waiting):
        put(node, search.reading(node))


def _improve(search: _Search, free: Sequence[Node]) -> None:
    """Move nodes, alone or with what feeds them or what they feed on their rank, until no move saves bytes."""
    members = set(free)
    for _ in range(_MAX_SWEEPS):
        improved = False
        for node in free:
            ways = ((True, False), (False, True), (True, True))
            for group in ([node], *(_connected(search, node, members, up=up, down=down) for up, down in ways)):
                ranks = set[int]().union(*map(search.neighbours, group)) - {search.rank[node]}
                improved |= bool(ranks) and search.best_move(group, ranks)
        if not improved:
            break


def _connected(search: _Search, start: Node, members: Container[Node], *, up: bool, down: bool) -> list[Node]:
    """Return a node with the free nodes on its rank that feed it (`up`) or that it feeds (`down`); none if too many."""
    found = [start]
    for node in found:
        around = [search.producer[v] for v in node.inputs if v in search.producer] if up else []
        around += [c for v in node.outputs for c in search.consumers.get(v, ())] if down else []
        around = [o for o in around if o in members and search.rank[o] == search.rank[start] and o not in found]
        found += dict.fromkeys(around)
        if len(found) > _MAX_GROUP:
            return []
    return found


def _finish(
    search: _Search, copied: set[Node], constants: frozenset[Value], result_ranks: Sequence[int | None]
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
                given = search.fixed_arguments
                ranks = {next((given[v] for v in node.inputs if v in given), 0)}
        else:
            ranks = {search.rank[node]}
        nodes[node] = tuple(sorted(ranks))
        for value in node.inputs:
            need.setdefault(value, set()).update(ranks)
    arguments = tuple(
        tuple(sorted(need.get(v, ()))) if v in constants else (_argument_rank(v, search, need),) for v in step.inputs
    )
    homes = dict(zip(step.inputs, arguments, strict=True))
    native = {v: ranks for node, ranks in nodes.items() for v in node.outputs}
    found = [
        min(native.get(atom) or homes.get(atom) or (0,)) if rank is None and isinstance(atom, Value) else rank or 0
        for atom, rank in zip(step.outputs, result_ranks, strict=True)
    ]
    sent = sum(v.nbytes * len(ranks - set(native.get(v) or homes.get(v) or ())) for v, ranks in need.items())
    return Placement({node: nodes[node] for node in step.nodes}, arguments, tuple(found), sent)


def _argument_rank(value: Value, search: _Search, need: Mapping[Value, set[int]]) -> int:
    """Return an argument's rank: the rank that updates it, so that the next step finds it there; else a reader's."""
    if value in search.fixed_arguments:
        return search.fixed_arguments[value]
    updating = [
        search.rank[node]
        for node in search.consumers.get(value, ())
        if node.origin is None and node.call is None and node in search.rank
    ]
    return min(updating or need.get(value) or {0})
