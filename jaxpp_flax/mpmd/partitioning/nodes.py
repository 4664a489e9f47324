"""Cut a traced step into nodes: the pieces that are placed on meshes, one by one.

A named computation is one node with all its equations; every other equation is a node of its own. Calls are inlined,
but a `scan`, `while` or `cond` stays one equation, and so does a rematerialised region without a name inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, bodies, values
from jaxpp_flax.mpmd.ops import calls_in, names_in
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Node", "ComputationOrigin", "Step", "nodes_of"]


class ComputationOrigin(NamedTuple):
    """A named computation, and the number of its transpositions: 0 forward, 1 backward."""

    name: str
    transpose_count: int = 0

    def __str__(self) -> str:
        return f'"{self.name}"' + (f"({self.transpose_count})" if self.transpose_count else "")


@dataclass(eq=False, slots=True)
class Node:
    """Equations that are placed together.

    `origin` is None for work without a name; `tensor` says that the name belongs to an array. `call` is the
    microbatch. `kind` is FORWARD, BACKWARD (recomputation included), or the half of a backward that is split. `names`
    are the names of all computations and arrays in the node. `rank` is -1 until the node is placed.
    """

    equations: tuple[Equation, ...]
    origin: ComputationOrigin | None
    tensor: bool
    call: int | None
    kind: TaskKind
    names: frozenset[str]
    rank: int = -1
    inputs: tuple[Value, ...] = field(init=False)
    outputs: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = tuple(v for e in self.equations for v in e.outputs)
        inside = set(self.outputs)
        reads = (a for e in self.equations for a in values(e.inputs) if a not in inside)
        self.inputs = tuple(dict.fromkeys(reads))

    @property
    def backward(self) -> bool:
        """True for backward work."""
        return self.kind is not TaskKind.FORWARD

    @property
    def computation(self) -> str | None:
        """The name of the computation; None for a named array, and for work without a name."""
        return None if self.origin is None or self.tensor else self.origin.name

    @property
    def where(self) -> str:
        """The line in the user's code."""
        return next((e.where for e in self.equations if e.where != "unknown"), "unknown")


@dataclass(frozen=True)
class Step:
    """A traced step as nodes, in program order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    nodes: tuple[Node, ...]


class _Scopes(NamedTuple):
    """What the scopes around an equation say: its origin, whether that is an array, its microbatch, and all names."""

    origin: ComputationOrigin | None
    tensor: bool
    call: int | None
    names: frozenset[str]


@lru_cache(maxsize=4096)
def _scopes(stack: Any, recomputed: bool) -> _Scopes:
    text = str(stack)
    computations, calls = names_in(text, "computation"), calls_in(text)
    names = [*computations, *names_in(text, "tensor")]
    origin = None
    for name, transposed, written in names[:1]:
        origin = ComputationOrigin(name, written + (0 if recomputed else transposed))
    return _Scopes(origin, not computations, calls[-1] if calls else None, frozenset(name for name, _, _ in names))


def _names_inside(params: Mapping[str, Any], names_of: dict[int, frozenset[str]]) -> frozenset[str]:
    """Return the names in the jaxprs in an equation's parameters; `names_of` has those of jaxprs seen before."""
    names: frozenset[str] = frozenset()
    for body in bodies(params):
        if id(body) not in names_of:
            stacks = {eqn.source_info.name_stack for eqn in body.eqns}
            inner = [_names_inside(eqn.params, names_of) for eqn in body.eqns]
            names_of[id(body)] = frozenset[str]().union(*(_scopes(stack, False).names for stack in stacks), *inner)
        names |= names_of[id(body)]
    return names


def _node(equation: Equation, names_of: dict[int, frozenset[str]]) -> Node:
    """Make a node of one equation."""
    origin, is_tensor, call, names = _scopes(getattr(equation.source, "name_stack", ""), equation.late)
    transposed = equation.transposed if origin is None or is_tensor else origin.transpose_count > 0
    backward = equation.late or transposed
    kind = TaskKind.BACKWARD if backward else TaskKind.FORWARD
    # `call` makes the index of a microbatch so. Inside the microbatch's work, it would make that work's program unique.
    is_index = equation.primitive is jax.lax.copy_p and not values(equation.inputs)
    names |= _names_inside(equation.params, names_of)
    return Node((equation,), origin, is_tensor, None if is_index else call, kind, names)


def nodes_of(graph: Graph) -> Step:
    """Inline a traced step into nodes; work without effect on the outputs is dropped.

    The program's call counters are numbered as microbatches from 0 on.
    """
    names_of: dict[int, frozenset[str]] = {}
    graph = inline(graph, flatten=True, remat=lambda equation: bool(_names_inside(equation.params, names_of)))
    single = [_node(equation, names_of) for equation in graph.equations]
    calls = sorted({node.call for node in single if node.call is not None})
    number = {call: k for k, call in enumerate(calls)}
    nodes: list[Node] = []
    backward: dict[Value, int | None] = {}  # results of backward work, with their microbatch
    for _, run in itertools.groupby(single, _belongs_to):
        node = _joined(list(run))
        if node.call is not None:
            node.call = number[node.call]
            # A reader of backward work is backward work of that microbatch.
            if node.origin is None and any(backward.get(v, -1) == node.call for v in node.inputs):
                node.kind = TaskKind.BACKWARD
        if node.backward:
            backward.update(dict.fromkeys(node.outputs, node.call))
        nodes.append(node)
    return Step(graph.inputs, graph.outputs, tuple(nodes))


def _belongs_to(node: Node) -> Any:
    """Return what the equations of one named computation have in common; an equation without a name stands alone."""
    return node if node.computation is None else (node.origin, node.call, node.kind)


def _joined(run: Sequence[Node]) -> Node:
    if len(run) == 1:
        return run[0]
    equations = tuple(equation for node in run for equation in node.equations)
    return replace(run[0], equations=equations, names=frozenset[str]().union(*(node.names for node in run)))
