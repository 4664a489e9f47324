"""Products whose result is narrower than their operands: sum first, then convert to the narrower dtype.

`lax.dot_general(x, y, preferred_element_type=int32)` of floats sums in float32 on one device and truncates the sum. If
the summed dimension is sharded, XLA truncates each shard's part and adds these: 0.5 + 0.5 gives 0. A product in
float32, followed by a conversion, adds the parts first. The rewrite works at any depth: in scans, conditions and calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpp_flax.engine.analyses.linearity import holds, parts_add_up
from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of
from jaxpp_flax.engine.tracing.rewriting import NestedRewriter, changed, is_same, part_of

__all__ = ["with_wide_sums"]

_DTYPE = "preferred_element_type"


def with_wide_sums(graph: Graph) -> Graph:
    """Rewrite the graph for a mesh of several devices; return the same object if nothing changes."""

    def jaxpr(old: Any) -> Any:
        new = [step for equation in old.eqns for step in _steps(equation, nested)]
        return old if is_same(new, old.eqns) else old.replace(eqns=new)

    nested = NestedRewriter(jaxpr)
    equations = [step for equation in graph.equations for step in _steps(equation, nested)]
    return graph if is_same(equations, graph.equations) else replace(graph, equations=tuple(equations))


def _steps(equation: Any, nested: NestedRewriter) -> Iterable[Any]:
    """Return the equation itself, or a product in a wide dtype and conversions to the narrow dtype."""
    facts = facts_of(equation.primitive)
    if facts.by_device:
        return [equation]
    if _DTYPE not in equation.params or facts.cost is not Cost.PRODUCT:
        return [changed(equation, params=nested.params(equation.params))]
    inputs, outputs = part_of(equation, "inputs"), part_of(equation, "outputs")
    first, second = (atom.aval.dtype for atom in inputs[:2])
    result = outputs[0].aval.dtype
    if parts_add_up((first, second), result):
        return [equation]
    wide = _wide(_wide(jnp.dtype(jnp.float32), first), second)
    conversions = _conversions(first if first == second else wide, wide, result)
    chain = [(equation.primitive, {**equation.params, _DTYPE: wide}, wide), *conversions]
    steps: list[Any] = []
    for primitive, params, dtype in chain:
        last = len(steps) == len(chain) - 1
        made = outputs if last else type(outputs)([_like(outputs[0], dtype)])
        steps.append(changed(equation, primitive=primitive, params=params, inputs=inputs, outputs=made))
        inputs = made
    return steps


def _wide(dtype: Any, operand: Any) -> Any:
    """Return the dtype in which products with an operand add up: float32 for integers and narrower floats."""
    narrow = not jnp.issubdtype(operand, jnp.inexact) or holds(operand, dtype)
    return dtype if narrow else jnp.promote_types(dtype, operand)


def _conversions(operand: Any, wide: Any, result: Any) -> list[tuple[Any, Any, Any]]:
    """Return the steps from the wide dtype to the result's dtype: (primitive, parameters, dtype) of each."""

    def narrowed(x: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x) and not jnp.issubdtype(result, jnp.complexfloating):
            x = lax.real(x)
        elif jnp.issubdtype(operand, jnp.floating) and result != jnp.bfloat16:
            # On one device, too, a product of bfloat16 is rounded to bfloat16 before it is truncated.
            x = lax.convert_element_type(x, operand)
        return lax.convert_element_type(x, result)

    equations = jax.make_jaxpr(narrowed)(jax.ShapeDtypeStruct((), wide)).eqns
    return [(e.primitive, e.params, e.outvars[0].aval.dtype) for e in equations]


def _like(variable: Any, dtype: Any) -> Any:
    """Make a new variable, of a graph or of a jaxpr, like another one but with another dtype."""
    return type(variable)(variable.aval.update(dtype=dtype, weak_type=False))
