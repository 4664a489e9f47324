"""The work of equations: floating-point operations, or the operations in the time in which their bytes are moved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxpp_flax.engine.analyses.equation_facts import avals_of
from jaxpp_flax.engine.tracing.ir import bodies
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of

__all__ = ["count_flops", "products", "work_of"]


def _moved_bytes(equation: Any) -> float:
    """Count the bytes that one equation without inner jaxprs reads and writes, if no fusion saves them.

    Contractions, sorts and scatters count operands and results, other equations their results; views count nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> [_moved_bytes(e) for e in jax.make_jaxpr(lambda x: jnp.exp(x @ x).reshape(16))(x).jaxpr.eqns]
      [192.0, 64.0, 0.0]
    """
    cost = facts_of(equation.primitive).cost
    if cost is Cost.VIEW:
        return 0.0
    operands, results = avals_of(equation)
    nbytes = sum(map(_nbytes, results))
    if cost in (Cost.READING, Cost.PRODUCT):
        nbytes += sum(map(_nbytes, operands))
    return float(nbytes)


def count_flops(equations: Iterable[Any]) -> float:
    """Return the floating-point operations of equations: the package's one count, on every backend.

    Contractions count two for each multiply-add; other equations count one for each element of their results.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> count_flops(jax.make_jaxpr(lambda x: jnp.exp(x @ x))(x).jaxpr.eqns)
      144.0
    """
    return float(sum(work_of(equation, 0.0) for equation in equations))


def work_of(equation: Any, flops_per_byte: float) -> float:
    """Return the FLOPs, or the FLOPs that could be done while the bytes are moved, if that is more.

    Contractions count two FLOPs for each multiply-add; other equations count one for each element of their results. A
    `while` counts one turn, because its length is unknown.
    """
    name, params = equation.primitive.name, equation.params
    inner = bodies(params)
    if inner:
        costs = [sum(work_of(e, flops_per_byte) for e in jaxpr.eqns) for jaxpr in inner]
        return _turns(equation) * (max(costs) if name == "cond" else sum(costs))
    operands, results = avals_of(equation)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        flops = 2.0 * _size(results[0]) * math.prod(operands[0].shape[d] for d in contracted)
    elif name == "conv_general_dilated":
        kernel = operands[1].shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        flops = 2.0 * _size(results[0]) * math.prod(kernel) / max(out_features, 1)
    elif name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        columns = set(range(operands[1].ndim)).difference(contracted, batch, numbers.rhs_group_dimensions)
        flops = 2.0 * _size(operands[0]) * math.prod(operands[1].shape[d] for d in columns)  # each row is in one group
    else:
        flops = float(sum(map(_size, results)))
    return max(flops, flops_per_byte * _moved_bytes(equation)) if flops_per_byte else flops


def products(equations: Iterable[Any], turns: int = 1) -> Iterator[tuple[Any, list[Any], float]]:
    """Yield each contraction, at any depth, with its operands and its FLOPs in all turns of the loops around it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> twice = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=2)[0]
      >>> [(e.primitive.name, flops) for e, _, flops in products(jax.make_jaxpr(twice)(x).jaxpr.eqns)]
      [('dot_general', 256.0)]
    """
    for equation in equations:
        inner = bodies(equation.params)
        for jaxpr in inner:
            yield from products(jaxpr.eqns, turns * _turns(equation))
        if not inner and facts_of(equation.primitive).cost is Cost.PRODUCT:
            yield equation, avals_of(equation)[0], turns * work_of(equation, 0.0)


def _turns(equation: Any) -> int:
    """Return how often an equation runs its bodies, as far as that is known."""
    return equation.params.get("length", 1) if equation.primitive.name == "scan" else 1


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0))


def _nbytes(aval: Any) -> int:
    return _size(aval) * int(getattr(getattr(aval, "dtype", None), "itemsize", 0))
