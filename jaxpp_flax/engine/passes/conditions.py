"""Conditions over the arrays of several ranks: all branches are computed, and each output is selected from them.

Optimizers that skip or delay updates (`optax.apply_if_finite`, `optax.MultiSteps`) put all parameters under one
`cond`. No rank has all of them, so the equations are placed one by one, as if they were outside the condition.

A `while` may never end in a branch that is not taken, and a callback may raise an error there. Each of these gets a
condition of its own, its *guard*: it runs where its branch is taken, and gives zeros elsewhere, which nobody selects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from jaxpp_flax.engine.tracing.hints import place_with_p
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Value, applied, emit, inside, opened, struct_of
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of

__all__ = ["is_condition", "select_between_branches"]

_FOREIGN = ("ffi_call", "pallas_call")  # code that JAX cannot see into


def is_condition(equation: Equation) -> bool:
    """Return whether an equation is a `cond` (or `switch`) without side effects that can be taken apart."""
    return equation.name == "cond" and not equation.effects and not _is_guard(equation)


def _is_guard(condition: Any) -> bool:
    """Return whether a `cond` has nothing but one operation that must not run if its branch is not taken."""
    working = [e for branch in condition.params["branches"] for e in _working(opened(branch))]
    if len(working) != 1 or not _needs_guard(working[0]):
        return False
    (only,) = working
    return _is_guard(only) if only.primitive.name == "cond" else facts_of(only.primitive).body is None


def _working(branch: Any) -> Iterator[Any]:
    """Yield the equations of a branch that depend on its operands, or need a guard."""
    dependent = set(branch.invars)
    for equation in branch.eqns:
        read = (atom for atom in equation.invars if not isinstance(atom, jex_core.Literal))
        if _needs_guard(equation) or not dependent.isdisjoint(read):
            dependent.update(equation.outvars)
            yield equation


def _needs_guard(equation: Any) -> bool:
    """Return whether an equation, of ours or of JAX, may run for ever or fail on values of a branch not taken."""
    return _may_not_end(equation) or any(map(_may_not_end, inside(equation.params)))


def _may_not_end(equation: Any) -> bool:
    if equation.primitive is place_with_p or equation.primitive.name == "scan":
        return False
    # A primitive without a row in the table is a callback, or one that the engine does not know.
    return equation.primitive.name in _FOREIGN or facts_of(equation.primitive).cost is Cost.LOOP


def select_between_branches(equation: Equation, is_taken: Atom | None = None) -> list[Equation]:
    """Run all branches one after another, and select each output.

    `is_taken` says whether the branch around this condition is taken; None if there is none, or it needs no guards.
    """
    index, *operands = equation.inputs
    equations, cases = list[Equation](), list[Sequence[Atom]]()
    for number, branch in enumerate(equation.params["branches"]):
        graph = inline(applied(branch, operands), flatten=True, remat=_needs_guard)
        cases.append(graph.outputs)
        if not any(map(_needs_guard, graph.equations)):
            equations += graph.equations
            continue
        comparison, (taken,) = _taken(equation, index, number, is_taken)
        equations += comparison
        for inner in graph.equations:
            equations += _guarded(inner, taken)
    equations += [
        Equation(jax.lax.select_n_p, {}, (index, *map(_typed, atoms)), (output,), source=equation.source)
        for output, *atoms in zip(equation.outputs, *cases, strict=True)
    ]
    return equations


def _taken(
    equation: Equation, index: Atom, number: int, is_outer_taken: Atom | None
) -> tuple[list[Equation], list[Atom]]:
    """Compute whether a branch of a condition is taken, and the branch around the condition too."""

    def taken(index: Any, *outer: Any) -> Any:
        own = index == number
        return own & outer[0] if outer else own

    return emit(taken, [index] if is_outer_taken is None else [index, is_outer_taken], like=equation)


def _guarded(equation: Equation, is_taken: Atom) -> list[Equation]:
    """Let an equation run only if its branch is taken, if it needs that."""
    if not _needs_guard(equation):
        return [equation]
    if is_condition(equation):
        return select_between_branches(equation, is_taken)
    inputs = dict.fromkeys(atom for atom in equation.inputs if isinstance(atom, Value))

    def guarded(is_taken: Any, *operands: Any) -> list[Any]:
        held = dict(zip(inputs, operands, strict=True))
        read = [atom.value if isinstance(atom, Constant) else held[atom] for atom in equation.inputs]
        return jax.lax.cond(is_taken, lambda: [*equation.bind(*read)], lambda: [*map(_zeros, equation.outputs)])

    return emit(guarded, [is_taken, *inputs], equation.outputs, like=equation)[0]


def _zeros(value: Value) -> jax.Array:
    return jax.lax.full(value.aval.shape, 0, value.aval.dtype, sharding=struct_of(value.aval).sharding)


def _typed(atom: Atom) -> Atom:
    """Turn a literal into an array of its type: its neighbours would decide the type of a bare Python number."""
    return Constant(np.asarray(atom.value, atom.aval.dtype), atom.aval) if isinstance(atom, Constant) else atom
