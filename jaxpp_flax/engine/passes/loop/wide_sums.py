"""Products whose result is narrower than their operands: sum first, then convert to the narrower dtype.

`lax.dot_general(x, y, preferred_element_type=int32)` of floats sums in float32 on one device and truncates the sum. If
the summed dimension is sharded, XLA truncates each shard's part and adds these: 0.5 + 0.5 gives 0. A product in
float32, followed by a conversion, adds the parts first. The rewrite works at any depth: in scans, conditions and calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpp_flax.engine.analyses.linearity import holds, parts_add_up
from jaxpp_flax.engine.tracing.ir import Equation, Graph, opened

__all__ = ["with_wide_sums"]

_DTYPE = "preferred_element_type"
_PRODUCTS = {"conv_general_dilated", "dot_general", "ragged_dot_general"}
# Each device runs these by itself: XLA partitions nothing inside.
_KERNELS = {"core_map", "pallas_call"}
# Old and new jaxprs by the old one's id; the old one is kept alive, so that no other object gets its id.
_Memo = dict[int, tuple[Any, Any]]


def with_wide_sums(graph: Graph) -> Graph:
    """Rewrite the graph for a mesh of several devices; return the same object if nothing changes."""
    equations = _equations(graph.equations, {})
    return graph if equations is graph.equations else replace(graph, equations=tuple(equations))


def _equations(before: Sequence[Any], memo: _Memo) -> Sequence[Any]:
    """Rewrite the equations of a graph or of a jaxpr."""
    after = [new for equation in before for new in _steps(equation, memo)]
    same = len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True))
    return before if same else after


def _steps(equation: Any, memo: _Memo) -> Iterable[Any]:
    """Return the equation itself, or a product in a wide dtype and conversions to the narrow dtype."""
    inputs, outputs, _ = _parts(equation)
    if equation.primitive.name in _KERNELS:
        return [equation]
    if _DTYPE not in equation.params or equation.primitive.name not in _PRODUCTS:
        params = _params(equation.params, memo)
        return [equation if params is equation.params else _changed(equation, params=params)]
    first, second = (atom.aval.dtype for atom in inputs[:2])
    result = outputs[0].aval.dtype
    if parts_add_up((first, second), result):
        return [equation]
    wide = _wide(_wide(jnp.dtype(jnp.float32), first), second)
    conversions = _conversions(first if first == second else wide, wide, result)
    chain = [(equation.primitive, {**equation.params, _DTYPE: wide}, wide), *conversions]
    steps: list[Any] = []
    for primitive, params, dtype in chain:
        made = outputs if len(steps) == len(chain) - 1 else [_like(outputs[0], dtype)]
        steps.append(_changed(equation, primitive=primitive, params=params, inputs=inputs, outputs=made))
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


def _parts(equation: Any) -> tuple[Sequence[Any], Sequence[Any], tuple[str, str]]:
    """Return the inputs and outputs of an equation of ours or of JAX, and the names of these two attributes."""
    names = ("inputs", "outputs") if isinstance(equation, Equation) else ("invars", "outvars")
    return getattr(equation, names[0]), getattr(equation, names[1]), names


def _changed(
    equation: Any, *, params: Mapping[str, Any], inputs: Any = None, outputs: Any = None, primitive: Any = None
) -> Any:
    changes: dict[str, Any] = {"params": dict(params)}
    for name, atoms in zip(_parts(equation)[2], (inputs, outputs), strict=True):
        if atoms is not None:
            changes[name] = tuple(atoms) if isinstance(equation, Equation) else list(atoms)
    if primitive is not None:
        changes["primitive"] = primitive
    return replace(equation, **changes) if isinstance(equation, Equation) else equation.replace(**changes)


def _like(variable: Any, dtype: Any) -> Any:
    """Make a new variable, of a graph or of a jaxpr, like another one but with another dtype."""
    return type(variable)(variable.aval.update(dtype=dtype, weak_type=False))


def _params(params: Mapping[str, Any], memo: _Memo) -> Mapping[str, Any]:
    changed = {name: new for name, value in params.items() if (new := _value(value, memo)) is not value}
    return {**params, **changed} if changed else params


def _value(value: Any, memo: _Memo) -> Any:
    if hasattr(opened(value), "eqns"):
        if id(value) not in memo:
            memo[id(value)] = (value, _jaxpr(value, memo))
        return memo[id(value)][1]
    if isinstance(value, (tuple, list)):
        parts = [_value(part, memo) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return getattr(value, "_make", type(value))(parts)  # a named tuple is made by its own function
    return value


def _jaxpr(jaxpr: Any, memo: _Memo) -> Any:
    inner = opened(jaxpr)
    equations = _equations(inner.eqns, memo)
    if equations is inner.eqns:
        return jaxpr
    new = inner.replace(eqns=equations)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)
