"""Place the nodes of a step on meshes: named nodes as assigned, the rest so that few bytes are transferred.

What has no operands, and small work on arguments alone (counters, rates, keys), runs on every rank that reads it. Two
walks place the other unnamed work; along a chain they find the fewest bytes:

1. Forwards: what does it cost to have a node's operands on a rank? Nothing where they are; elsewhere the bytes of each,
   or fewer, if the unnamed work that makes it can run there.
2. Backwards: which ranks need a value? Each node goes where its operands cost the least, with its results sent from
   there to all that need them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jaxpp_flax.engine.tracing.ir import Atom, Value
from jaxpp_flax.mpmd.partitioning.nodes import Node, Step

__all__ = ["PlacedNodes", "infer"]

_SCALAR_BYTES = 64  # step counters, learning rates, keys: cheaper to compute on each mesh than to send


@dataclass(frozen=True)
class PlacedNodes:
    """A step whose nodes have ranks.

    Work on several ranks is a node for each, which makes values of its own. `arguments` holds the rank of each input,
    or of a captured constant all ranks that read it; `results` the rank of each output; `transferred` the bytes sent.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    nodes: tuple[Node, ...]
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    transferred: int


def infer(
    step: Step,
    fixed: Mapping[Node, int],
    constants: frozenset[Value],
    argument_ranks: Mapping[Value, int],
    result_ranks: Sequence[int | None],
) -> PlacedNodes:
    """Place the nodes that are not fixed.

    `constants` are the inputs that are captured arrays: a copy on every rank costs nothing per step. `argument_ranks`
    and `result_ranks` hold the ranks that the user gave.
    """
    copied = _copied(step, fixed)
    wanted = [(a, r) for a, r in zip(step.outputs, result_ranks, strict=True) if isinstance(a, Value) and r is not None]
    holders = _there_anyway(fixed, [*argument_ranks.items(), *wanted])
    costs = _operand_costs(step, fixed, constants | {v for node in copied for v in node.outputs}, holders)
    need: defaultdict[Value, set[int]] = defaultdict(set)
    for value, rank in wanted:
        need[value].add(rank)
    ranks: dict[Node, tuple[int, ...]] = {}
    for node in reversed(step.nodes):
        readers = {rank for value in node.outputs for rank in need[value]}
        if node in copied:
            default = next((argument_ranks[v] for v in node.inputs if v in argument_ranks), 0)
            ranks[node] = tuple(sorted(readers)) or (default,)
        else:
            ranks[node] = (fixed[node] if node in fixed else _cheapest(node, *costs[node], need),)
        for value in node.inputs:
            need[value].update(ranks[node])
    homes: dict[Value, tuple[int, ...]] = {value: (rank,) for value, rank in argument_ranks.items()}
    homes.update({value: tuple(sorted(need[value])) for value in constants})
    for node in step.nodes:  # an argument lives where it is updated, so that the next step finds it there
        if node.origin is None and node.call is None and node not in copied:
            for value in node.inputs:
                homes.setdefault(value, ranks[node])
    for value in step.inputs:
        homes.setdefault(value, (min(need[value], default=0),))
    native: dict[Atom, tuple[int, ...]] = {
        **homes,
        **{value: ranks[node] for node in step.nodes for value in node.outputs},
    }
    nodes, on_rank = _on_ranks(step.nodes, ranks)
    results = [
        (native.get(atom) or (0,))[0] if rank is None else rank
        for atom, rank in zip(step.outputs, result_ranks, strict=True)
    ]
    return PlacedNodes(
        step.inputs,
        tuple(on_rank.get((atom, rank), atom) for atom, rank in zip(step.outputs, results, strict=True)),
        nodes,
        tuple(homes[value] for value in step.inputs),
        tuple(results),
        sum(value.nbytes * len(readers.difference(native[value])) for value, readers in need.items()),
    )


def _copied(step: Step, fixed: Mapping[Node, int]) -> set[Node]:
    """Find the nodes that run on every rank that reads them: no operands, or small ones that read arguments only."""
    everywhere: set[Value] = set(step.inputs)
    copied: set[Node] = set()
    for node in step.nodes:
        if node in fixed or any(e.effects for e in node.equations):
            continue
        small = all(v.nbytes <= _SCALAR_BYTES for v in (*node.inputs, *node.outputs))
        if not node.inputs or (small and everywhere.issuperset(node.inputs)):
            copied.add(node)
            everywhere.update(v for v in node.outputs if v.nbytes <= _SCALAR_BYTES)
    return copied


def _there_anyway(fixed: Mapping[Node, int], given: Iterable[tuple[Value, int]]) -> defaultdict[Value, set[int]]:
    """Return the ranks that have a value wherever unnamed work runs: named work makes or reads it, or the user says."""
    ranks: defaultdict[Value, set[int]] = defaultdict(set)
    for value, rank in given:
        ranks[value].add(rank)
    for node, rank in fixed.items():
        for value in (*node.inputs, *node.outputs):
            ranks[value].add(rank)
    return ranks


def _operand_costs(
    step: Step, fixed: Mapping[Node, int], everywhere: Set[Value], holders: Mapping[Value, set[int]]
) -> dict[Node, tuple[dict[int, int], int]]:
    """Return what each free node's operands cost: on each rank where some of them are cheap, and on any other rank."""

    def price(value: Value) -> tuple[dict[int, int], int]:
        return dict.fromkeys(holders[value], 0), _size(value)

    # What each value costs, if it lies somewhere: on ranks where it is cheap, and on any other rank.
    prices = {value: price(value) for value in step.inputs if value in holders and value not in everywhere}
    cost_of: dict[Node, tuple[dict[int, int], int]] = {}
    for node in step.nodes:
        if node in fixed:
            prices.update({value: price(value) for value in node.outputs})
            continue
        read = [prices[value] for value in node.inputs if value in prices]
        ranks = {rank for near, _ in read for rank in near}
        costs = {rank: sum(near.get(rank, far) for near, far in read) for rank in ranks}
        cost_of[node] = costs, sum(far for _, far in read)
        for value in set(node.outputs) - everywhere if costs else ():
            least = min(costs.values())
            far = min(cost_of[node][1] - least, _size(value))
            near = {rank: cost - least for rank, cost in costs.items() if cost - least < far}
            prices[value] = near | dict.fromkeys(holders.get(value, ()), 0), far
    return cost_of


def _cheapest(node: Node, costs: Mapping[int, int], elsewhere: int, need: Mapping[Value, set[int]]) -> int:
    """Return the rank on which a node's operands and the copies of its results cost the fewest bytes."""

    def total(rank: int) -> int:
        return costs.get(rank, elsewhere) + sum(_size(v) * len(need[v] - {rank}) for v in node.outputs)

    ranks = {*costs, *(rank for value in node.outputs for rank in need[value])}
    return min(ranks, key=lambda rank: (total(rank), rank), default=0)


def _size(value: Value) -> int:
    """Return what a transfer of a value costs: its bytes, and a little for the transfer."""
    return value.nbytes + 1


def _on_ranks(
    nodes: Sequence[Node], ranks: Mapping[Node, tuple[int, ...]]
) -> tuple[tuple[Node, ...], dict[tuple[Atom, int], Value]]:
    """Return a node for each rank of each node, and the values that these make in place of a node's own, by rank."""
    on_rank: dict[tuple[Atom, int], Value] = {}
    placed: list[Node] = []
    for node in nodes:
        for turn, rank in enumerate(ranks[node]):
            equations = [e.reading(tuple(on_rank.get((atom, rank), atom) for atom in e.inputs)) for e in node.equations]
            if turn:
                on_rank.update({(value, rank): Value(value.aval) for value in node.outputs})
                equations = [replace(e, outputs=tuple(on_rank[value, rank] for value in e.outputs)) for e in equations]
            placed.append(replace(node, equations=tuple(equations), rank=rank))
    return tuple(placed), on_rank
