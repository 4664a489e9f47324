"""Split conditions over the arrays of several ranks, so that each rank has a condition for its own arrays.

Optimizers that skip or delay updates (`optax.apply_if_finite`, `optax.MultiSteps`) put all parameters under one
`cond`. Its outputs form groups that share no array. Each group becomes a condition of its own, with the same predicate.
Some groups still mix ranks, for example if a branch clips by the norm of all gradients. Then all branches are computed,
and each output is selected from them: the equations are placed one by one, as if they were outside the condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.analyses.data_flow import ancestors
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Constant,
    Equation,
    Graph,
    Value,
    applied,
    emit,
    in_memory,
    memory_kind_of,
    producers,
    prune,
    values,
)

__all__ = ["is_condition", "select_between_branches", "split_conditions"]


def is_condition(equation: Equation) -> bool:
    """Return whether an equation is a `cond` (or `switch`) without side effects."""
    return equation.name == "cond" and not equation.effects


def split_conditions(graph: Graph) -> Graph:
    """Return the same function with every condition at the top level split."""
    equations = [part for e in graph.equations for part in (_split_condition(e) if is_condition(e) else [e])]
    return replace(graph, equations=tuple(equations))


def _split_condition(equation: Equation) -> list[Equation]:
    """Make one condition for each group of outputs; two groups share no array, but may share scalars."""
    branches = _branches(equation)
    groups = _groups(branches, len(equation.outputs))
    if len(groups) == 1:
        return [equation]
    parts: list[Equation] = []
    for group in groups:
        graphs = [prune(replace(b, outputs=tuple(b.outputs[k] for k in group))) for b in branches]
        read = {a for g in graphs for atoms in (g.outputs, *(e.inputs for e in g.equations)) for a in values(atoms)}
        operands = [v for v in dict.fromkeys(values(equation.inputs[1:])) if v in read]
        parts.extend(_condition(equation, operands, graphs, [equation.outputs[k] for k in group]))
    return parts


def select_between_branches(equation: Equation) -> list[Equation]:
    """Run all branches one after another, and select each output."""
    branches = [inline(b, flatten=True) for b in _branches(equation)]
    equations = [e for branch in branches for e in branch.equations]
    for position, output in enumerate(equation.outputs):
        cases = [branch.outputs[position] for branch in branches]
        (select,), _ = emit(jax.lax.select_n, [equation.inputs[0], *cases], struct=_struct)
        equations.append(replace(select, outputs=(output,), source=equation.source))
    return equations


def _branches(equation: Equation) -> list[Graph]:
    """Return the branches as graphs over the condition's own operands."""
    graphs: list[Graph] = []
    for branch in equation.params["branches"]:
        graph = applied(branch, equation.inputs[1:])
        outputs = tuple(_typed(a) for a in graph.outputs)
        graphs.append(replace(graph, inputs=tuple(dict.fromkeys(graph.inputs)), outputs=outputs))
    return graphs


def _typed(atom: Atom) -> Atom:
    """Turn a literal into an array of its type: its neighbours would decide the type of a bare Python number."""
    return Constant(np.asarray(atom.value, atom.aval.dtype), atom.aval) if isinstance(atom, Constant) else atom


def _groups(branches: Sequence[Graph], count: int) -> list[list[int]]:
    """Group the positions of outputs that share an array, or the work that makes one."""
    parent = list(range(count))

    def find(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    for branch in branches:
        producer = producers(branch.equations)
        owner: dict[Value, int] = {}
        for position in range(count):
            for value in ancestors([branch.outputs[position]], producer):
                if not _is_shared(value, producer):
                    parent[find(position)] = find(owner.setdefault(value, position))
    groups: dict[int, list[int]] = {}
    for position in range(count):
        groups.setdefault(find(position), []).append(position)
    return list(groups.values())


def _is_shared(value: Value, producer: dict[Value, Equation]) -> bool:
    """Return whether a value may be computed twice: a scalar that depends only on scalars."""
    arrays = [v for v in ancestors([value], producer) if v.aval.size > 1]
    return all(v in producer and not producer[v].inputs for v in arrays)


def _condition(
    equation: Equation, operands: Sequence[Value], graphs: Sequence[Graph], outputs: Sequence[Value]
) -> list[Equation]:
    """Make a condition over other branches, with given outputs."""
    branches = [replace(graph, inputs=tuple(operands)).run for graph in graphs]
    inputs = [equation.inputs[0], *operands]
    equations, _ = emit(lambda index, *xs: jax.lax.switch(index, branches, *xs), inputs, outputs, struct=_struct)
    return [replace(e, source=equation.source) for e in equations]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = in_memory(None, memory_kind_of(aval))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))
