"""What is asked of equations of ours and of JAX's alike: a graph holds ours, and the jaxprs inside them hold JAX's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.extend import source_info_util

from jaxpp_flax.engine.tracing.ir import Equation, Value, values

__all__ = ["avals_of", "is_small_of_large", "numbers_of_large", "place_of"]

_SMALL = 64  # elements


def avals_of(equation: Any) -> tuple[list[Any], list[Any]]:
    """Return the types of what an equation reads, and of what it makes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> (equation,) = jax.make_jaxpr(lambda x: x < 1)(jnp.ones(2)).jaxpr.eqns
      >>> [aval.str_short() for aval in avals_of(equation)[1]]
      ['bool[2]']
    """
    of_ours = isinstance(equation, Equation)
    operands, results = (equation.inputs, equation.outputs) if of_ours else (equation.invars, equation.outvars)
    return [a.aval for a in operands], [v.aval for v in results]


def place_of(equation: Any) -> str:
    """Return `file:line (function)` of the user's code that made an equation, or `"unknown"`."""
    return equation.where if isinstance(equation, Equation) else source_info_util.summarize(equation.source_info)


def is_small_of_large(equation: Equation) -> bool:
    """Return whether all results together are a few numbers, and much less than an operand: a sum, a norm, a maximum.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxpp_flax.engine.tracing.ir import from_jaxpr
      >>> graph, _ = from_jaxpr(jax.make_jaxpr(lambda w: jnp.sum(w * 2))(jnp.ones((8, 8))))
      >>> [(e.name, is_small_of_large(e)) for e in graph.equations]
      [('mul', False), ('reduce_sum', True)]
    """
    size = sum(value.aval.size for value in equation.outputs)
    return size <= _SMALL and any(value.aval.size >= 4 * max(size, 1) for value in values(equation.inputs))


def numbers_of_large(equation: Equation) -> list[Value]:
    """Return the numbers among the results, if they are few and much less than an operand.

    Other results may be large, as what a scan over the rows of an array keeps for the gradient of a sum.
    """
    numbers = [value for value in equation.outputs if value.aval.size == 1]
    return numbers if is_small_of_large(replace(equation, outputs=tuple(numbers))) else []
