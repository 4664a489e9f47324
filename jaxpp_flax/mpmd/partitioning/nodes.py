"""Cut a traced step into nodes: the pieces that are placed on meshes, one by one.

A named computation is one node with all its equations; every other equation is a node of its own. Calls are inlined,
but a `scan`, `while` or `cond` stays one equation. A rematerialised region without a name inside also stays one
equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxpp_flax.engine.tracing.inline import is_recomputation
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Equation,
    Graph,
    Value,
    applied,
    bodies,
    emit,
    prune,
    values,
)
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.mpmd.ops import calls_in, computations_in, named_tensor_p, transposes_in

__all__ = ["Node", "Origin", "Step", "nodes_of"]

# JAX's scope around the recomputed part of a rematerialised region.
_RECOMPUTED = "rematted_computation"


@dataclass(frozen=True, slots=True)
class Origin:
    """A named computation, and the number of its transpositions: 0 forward, 1 backward."""

    name: str
    transpose_count: int = 0

    def __str__(self) -> str:
        return f'"{self.name}"' + (f"({self.transpose_count})" if self.transpose_count else "")


@dataclass(eq=False, slots=True)
class Node:
    """Equations that are placed together.

    `origin` is None for work without a name; `tensor` says that the name belongs to an array. `call` is the
    microbatch; `backward` marks backward work, recomputation included. `names` are the names of all computations and
    arrays in the node.
    """

    equations: tuple[Equation, ...]
    origin: Origin | None = None
    tensor: bool = False
    call: int | None = None
    backward: bool = False
    names: frozenset[str] = frozenset()
    inputs: tuple[Value, ...] = field(init=False)
    outputs: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = tuple(v for e in self.equations for v in e.outputs)
        inside = set(self.outputs)
        reads = (a for e in self.equations for a in values(e.inputs) if a not in inside)
        self.inputs = tuple(dict.fromkeys(reads))

    def with_equations(self, equations: tuple[Equation, ...]) -> Node:
        """Return a node like this one that holds some of its equations."""
        return Node(equations, self.origin, self.tensor, self.call, self.backward, self.names)

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


@dataclass(frozen=True, slots=True)
class _Around:
    """The surroundings of an inlined call."""

    stack: str = ""
    backward: bool = False
    recomputed: bool = False


class _Flattener:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.substitution: dict[Value, Atom] = {}
        # Results of backward work, with their microbatch: a reader of one is backward work of that microbatch.
        self.backward: dict[Value, int | None] = {}
        self.atom: list[Equation] | None = None
        self.memo: dict[int, set[str]] = {}

    def resolve(self, atom: Atom) -> Atom:
        while isinstance(atom, Value) and atom in self.substitution:
            atom = self.substitution[atom]
        return atom

    def walk(self, equations: Sequence[Equation], around: _Around) -> None:
        for found in equations:
            stack = f"{around.stack}/{getattr(found.source, 'name_stack', '')}"
            recomputed = around.recomputed or _RECOMPUTED in stack
            inputs = tuple(self.resolve(atom) for atom in found.inputs)
            backward = around.backward or found.transposed or recomputed
            equation = replace(found, inputs=inputs, transposed=backward and not recomputed, late=recomputed)
            here = _Around(stack, backward, recomputed)
            names = computations_in(stack)
            if self.atom is None and names and equation.name in ("jit", "pjit"):
                self._named(equation, here, names)
            elif self._inlines(equation):
                self._call(equation, here)
            else:
                self._append(equation, here)

    def _inlines(self, equation: Equation) -> bool:
        if facts_of(equation.primitive).recomputes:
            return bool(self._names_inside(equation))
        return facts_of(equation.primitive).body is not None

    def _names_inside(self, equation: Equation) -> set[str]:
        found: set[str] = set()
        for body in bodies(equation.params):
            found |= self._names_in(body)
        return found

    def _names_in(self, jaxpr: Any) -> set[str]:
        known = self.memo.get(id(jaxpr))
        if known is None:
            known = self.memo[id(jaxpr)] = set()
            for eqn in jaxpr.eqns:
                known.update(name for name, _ in computations_in(str(eqn.source_info.name_stack)))
                if eqn.primitive is named_tensor_p:
                    known.add(eqn.params["name"])
                for body in bodies(eqn.params):
                    known |= self._names_in(body)
        return known

    def _named(self, equation: Equation, around: _Around, names: list[tuple[str, int]]) -> None:
        """Make one node of a named computation and all equations in it."""
        self.atom = []
        self._call(equation, around)
        equations, self.atom = tuple(self.atom), None
        if not equations:
            return
        (name, written) = names[0]
        count = 0 if around.recomputed else transposes_in(around.stack)
        self._add(
            Node(
                equations,
                Origin(name, count + written),
                call=_last(calls_in(around.stack)),
                backward=around.backward or bool(written),
                names=frozenset({*(name for name, _ in names), *self._names_inside(equation)}),
            )
        )

    def _append(self, equation: Equation, around: _Around) -> None:
        if self.atom is not None:
            self.atom.append(equation)
            return
        tensor = equation.params["name"] if equation.primitive is named_tensor_p else None
        self._add(
            Node(
                (equation,),
                Origin(tensor, transposes_in(around.stack)) if tensor is not None else None,
                tensor=tensor is not None,
                call=_last(calls_in(around.stack)),
                backward=around.backward,
                names=frozenset({tensor} if tensor is not None else self._names_inside(equation)),
            )
        )

    def _add(self, node: Node) -> None:
        if not node.backward and node.origin is None and node.call is not None:
            node.backward = any(self.backward.get(v, -1) == node.call for v in node.inputs)
        if node.backward:
            self.backward.update(dict.fromkeys(node.outputs, node.call))
        self.nodes.append(node)

    def _call(self, equation: Equation, around: _Around) -> None:
        body = facts_of(equation.primitive).body_in(equation.params)
        operands = list(equation.inputs)
        if self.atom is None and calls_in(str(getattr(equation.source, "name_stack", ""))):
            operands = [self._materialised(atom, around) for atom in operands]
        graph = applied(body, operands)
        if is_recomputation(equation) and not any(_RECOMPUTED in _stack(e) for e in graph.equations):
            # No scope marks the recomputed part: the whole region counts as backward work of the names in it.
            around = replace(around, backward=True)
        self.walk(graph.equations, replace(around, recomputed=around.recomputed and not is_recomputation(equation)))
        for outer, inner in zip(equation.outputs, graph.outputs, strict=True):
            self.substitution[outer] = self.resolve(inner)

    def _materialised(self, atom: Atom, around: _Around) -> Atom:
        """Turn a microbatch's literal operand (its index) into a value, so that all microbatches run one program."""
        if isinstance(atom, Value):
            return atom
        (copy,), (value,) = emit(jax.lax.copy_p.bind, [atom])
        self.nodes.append(Node((copy,)))
        return value


def _stack(equation: Equation) -> str:
    return str(getattr(equation.source, "name_stack", ""))


def _last(calls: list[int]) -> int | None:
    return calls[-1] if calls else None


def nodes_of(graph: Graph) -> Step:
    """Inline a traced step into nodes; work without effect on the outputs is dropped."""
    graph = prune(graph)
    flattener = _Flattener()
    flattener.walk(graph.equations, _Around())
    outputs = tuple(flattener.resolve(atom) for atom in graph.outputs)
    return Step(graph.inputs, outputs, _pruned(flattener.nodes, outputs))


def _pruned(nodes: Sequence[Node], outputs: Sequence[Atom]) -> tuple[Node, ...]:
    """Drop work without effect on the outputs, inside named computations too."""
    needed = set(values(outputs))
    kept: list[Node] = []
    for node in reversed(nodes):
        wanted = tuple(v for v in node.outputs if v in needed)
        if not wanted and not any(e.effects for e in node.equations):
            continue
        if len(node.equations) > 1:
            node = node.with_equations(prune(Graph(node.inputs, wanted, node.equations)).equations)
        kept.append(node)
        needed.update(node.inputs)
    return tuple(reversed(kept))
