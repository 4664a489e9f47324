"""Conditions over the arrays of several ranks: all branches are computed, and each output is selected from them.

Optimizers that skip or delay updates (`optax.apply_if_finite`, `optax.MultiSteps`) put all parameters under one
`cond`. No rank has all of them, so the equations are placed one by one, as if they were outside the condition.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, applied

__all__ = ["is_condition", "select_between_branches"]


def is_condition(equation: Equation) -> bool:
    """Return whether an equation is a `cond` (or `switch`) without side effects."""
    return equation.name == "cond" and not equation.effects


def select_between_branches(equation: Equation) -> list[Equation]:
    """Run all branches one after another, and select each output."""
    branches = [inline(applied(branch, equation.inputs[1:]), flatten=True) for branch in equation.params["branches"]]
    selected = [
        Equation(jax.lax.select_n_p, {}, (equation.inputs[0], *map(_typed, cases)), (output,), source=equation.source)
        for output, *cases in zip(equation.outputs, *(branch.outputs for branch in branches), strict=True)
    ]
    return [*(e for branch in branches for e in branch.equations), *selected]


def _typed(atom: Atom) -> Atom:
    """Turn a literal into an array of its type: its neighbours would decide the type of a bare Python number."""
    return Constant(np.asarray(atom.value, atom.aval.dtype), atom.aval) if isinstance(atom, Constant) else atom
