"""Split named backward computations into the part that the previous stage awaits, and the weight gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jaxpp_flax.engine.tracing.ir import Equation, Value, values
from jaxpp_flax.mpmd.partitioning.nodes import Node

__all__ = ["split_backward"]


def split_backward(
    nodes: Sequence[Node], stage_of: Mapping[str, int], stages: Collection[int]
) -> tuple[tuple[Node, ...], dict[Node, Node], frozenset[Node]]:
    """Split the backward computations of some stages.

    Args:
      nodes: in program order.
      stage_of: the stage of each name.
      stages: the stages to split.

    Returns:
      All nodes; the original node of each half; and the nodes that hold only weight gradients.
    """

    def splits(node: Node) -> bool:
        named = node.origin is not None and not node.tensor and node.backward and node.call is not None
        return named and node.origin is not None and stage_of.get(node.origin.name) in stages

    leads = _leads_to_backward(nodes)
    found: list[Node] = []
    halves: dict[Node, Node] = {}
    weights: set[Node] = set()
    for node in nodes:
        if not splits(node):
            found.append(node)
            continue
        first, second = _slice(node, {v for v in node.outputs if v in leads})
        for equations, late in ((first, False), (second, True)):
            if equations:
                half = Node(equations, node.origin, node.tensor, node.call, node.backward, node.names)
                halves[half] = node
                found.append(half)
                if late:
                    weights.add(half)
    return tuple(found), halves, frozenset(weights)


def _leads_to_backward(nodes: Sequence[Node]) -> set[Value]:
    """Find the values that lead, through unnamed work, to named backward work of the same microbatch."""
    leads: dict[Value, set[int | None]] = {}
    for node in reversed(nodes):
        if node.origin is not None and not node.tensor:
            calls = {node.call} if node.backward else set[int | None]()
        else:
            calls = set[int | None]().union(*(leads.get(v, set()) for v in node.outputs))
            # Accumulation takes a value into the next microbatch, which does not wait for it.
            calls &= {node.call}
        for value in node.inputs:
            leads.setdefault(value, set()).update(calls)
    maker = {v: node for node in nodes for v in node.outputs}
    return {v for v, calls in leads.items() if v in maker and maker[v].call in calls}


def _slice(node: Node, wanted: set[Value]) -> tuple[tuple[Equation, ...], tuple[Equation, ...]]:
    needed = set(wanted)
    first: list[Equation] = []
    for equation in reversed(node.equations):
        if not needed.isdisjoint(equation.outputs):
            first.append(equation)
            needed.update(values(equation.inputs))
    chosen = set(first)
    return tuple(reversed(first)), tuple(e for e in node.equations if e not in chosen)
