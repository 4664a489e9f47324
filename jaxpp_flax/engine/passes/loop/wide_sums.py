"""Products whose result is narrower than their operands: sum first, then convert to the narrower dtype.

`lax.dot_general(x, y, preferred_element_type=int32)` of floats sums in float32 on one device and truncates the sum. If
the summed dimension is sharded, XLA truncates each shard's part and adds these: 0.5 + 0.5 gives 0. A product in
float32, followed by a conversion, adds the parts first. The rewrite works at any depth: in scans, conditions and calls.
"""

from __future__ import annotations

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

    def widened(old: Any) -> list[Any]:
        return [step for equation in old for step in _steps(equation, nested)]

    def jaxpr(old: Any) -> Any:
        new = widened(old.eqns)
        return old if is_same(new, old.eqns) else old.replace(eqns=new)

    nested = NestedRewriter(jaxpr)
    equations = tuple(widened(graph.equations))
    return graph if is_same(equations, graph.equations) else replace(graph, equations=equations)


def _steps(equation: Any, nested: NestedRewriter) -> list[Any]:
    """Return the equation itself, or a product in a wide dtype and the conversions of its result."""
    facts = facts_of(equation.primitive)
    if facts.by_device:
        return [equation]
    if _DTYPE not in equation.params or facts.cost is not Cost.PRODUCT:
        return [changed(equation, params=nested.params(equation.params))]
    inputs, (result,) = part_of(equation, "inputs"), part_of(equation, "outputs")
    atoms = type(inputs)
    operands = [atom.aval.dtype for atom in inputs[:2]]
    if all(parts_add_up(dtype, result.aval.dtype) for dtype in operands):
        return [equation]
    wide = jnp.dtype(jnp.float32)  # integers and narrower floats add up in this
    for dtype in operands:
        if jnp.issubdtype(dtype, jnp.inexact) and not holds(dtype, wide):
            wide = jnp.promote_types(wide, dtype)

    def narrowed(x: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x) and not jnp.issubdtype(result.aval.dtype, jnp.complexfloating):
            x = lax.real(x)
        elif (
            len(set(operands)) == 1 and jnp.issubdtype(operands[0], jnp.floating) and result.aval.dtype != jnp.bfloat16
        ):
            # On one device, too, a product of bfloat16 is rounded to bfloat16 before it is truncated.
            x = lax.convert_element_type(x, operands[0])
        return lax.convert_element_type(x, result.aval.dtype)

    def like_result(dtype: Any) -> Any:
        return type(result)(result.aval.update(dtype=dtype, weak_type=False))

    # Equation by equation: JAX knows the types of values inside a shard_map only from its own equations.
    total = like_result(wide)
    steps = [changed(equation, params={**equation.params, _DTYPE: wide}, outputs=atoms([total]))]
    conversions = jax.make_jaxpr(narrowed)(jax.ShapeDtypeStruct((), wide)).eqns
    for number, e in enumerate(conversions, 1):
        made = result if number == len(conversions) else like_result(e.outvars[0].aval.dtype)
        steps.append(
            changed(equation, primitive=e.primitive, params=e.params, inputs=atoms([total]), outputs=atoms([made]))
        )
        total = made
    return steps
