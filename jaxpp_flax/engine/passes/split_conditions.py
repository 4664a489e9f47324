"""Split conditions over the arrays of several ranks, so that each rank has conditions for its own arrays.

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

from jaxpp_flax.engine.analyses.data_flow import Groups
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Constant,
    Equation,
    Graph,
    applied,
    emit,
    in_memory,
    memory_kind_of,
    prune,
    values,
)

__all__ = ["is_condition", "select_between_branches", "split_condition"]


def is_condition(equation: Equation) -> bool:
    """Return whether an equation is a `cond` (or `switch`) without side effects."""
    return equation.name == "cond" and not equation.effects


def split_condition(equation: Equation) -> list[Equation]:
    """Return one condition for each group of outputs; two groups share no array, but may share scalars."""
    branches = _branches(equation)
    groups = Groups(v for v in values(equation.inputs[1:]) if v.aval.size > 1)
    for branch in branches:
        for each in branch.equations:
            groups.join_results(each)
        for position, atom in enumerate(branch.outputs):
            groups.join([position, atom] if atom in groups else [position])
    members: dict[Any, list[int]] = {}
    for position in range(len(equation.outputs)):
        members.setdefault(groups.find(position), []).append(position)
    if len(members) == 1:
        return [equation]
    return [part for positions in members.values() for part in _condition(equation, branches, positions)]


def select_between_branches(equation: Equation) -> list[Equation]:
    """Run all branches one after another, and select each output."""
    branches = _branches(equation)
    selected = [
        Equation(jax.lax.select_n_p, {}, (equation.inputs[0], *cases), (output,), source=equation.source)
        for output, *cases in zip(equation.outputs, *(branch.outputs for branch in branches), strict=True)
    ]
    return [*(e for branch in branches for e in branch.equations), *selected]


def _branches(equation: Equation) -> list[Graph]:
    """Return the branches as graphs over the condition's own operands, with plain calls inlined."""
    graphs = [inline(applied(branch, equation.inputs[1:]), flatten=True) for branch in equation.params["branches"]]
    return [replace(graph, outputs=tuple(map(_typed, graph.outputs))) for graph in graphs]


def _typed(atom: Atom) -> Atom:
    """Turn a literal into an array of its type: its neighbours would decide the type of a bare Python number."""
    return Constant(np.asarray(atom.value, atom.aval.dtype), atom.aval) if isinstance(atom, Constant) else atom


def _condition(equation: Equation, branches: Sequence[Graph], positions: Sequence[int]) -> list[Equation]:
    """Return a condition that makes some of the outputs, and reads what these need."""
    graphs = [prune(replace(b, outputs=tuple(b.outputs[k] for k in positions))) for b in branches]
    read = {v for g in graphs for atoms in (g.outputs, *(e.inputs for e in g.equations)) for v in values(atoms)}
    operands = [v for v in dict.fromkeys(values(equation.inputs[1:])) if v in read]
    runs = [replace(graph, inputs=tuple(operands)).run for graph in graphs]
    equations, _ = emit(
        lambda index, *xs: jax.lax.switch(index, runs, *xs),
        [equation.inputs[0], *operands],
        [equation.outputs[k] for k in positions],
        struct=_struct,
    )
    return [replace(e, source=equation.source) for e in equations]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = in_memory(None, memory_kind_of(aval))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))
