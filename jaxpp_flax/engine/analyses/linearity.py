"""The dtypes in which a sum over the batch is the sum of its shards' parts. A sum is deferred past these only.

An operation `f` is linear in `tracing/primitives.py` only if `f(a) + f(b)` is `f(a + b)` for every `a` and `b` of these
dtypes, apart from the rounding that a float sum has in any order. A sum is never deferred past other operations:

- floats widen without loss. A narrower dtype rounds each part, and an integer or bool dtype cuts it off.
- float16 ends at 65504. Parts may pass this limit although their total does not. So float16 sums may only be moved
  and widened.
- integers, bool, the 4-bit and the 8-bit float dtypes are never summed in parts: no gradient has them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.ir import Equation
from jaxpp_flax.engine.tracing.primitives import Linear, facts_of

__all__ = ["accumulates", "passes_parts", "sums_in_parts"]

# A dtype of JAX: one of NumPy, one of ml_dtypes, or an extended dtype such as the dtype of PRNG keys.
DType = Any


def accumulates(dtype: DType) -> bool:
    """Return whether sums of this dtype may be taken in any order and in parts."""
    return dtype.name in ("bfloat16", "float32", "float64", "complex64", "complex128")


def sums_in_parts(equation: Equation) -> bool:
    """Return whether the parts of an equation's sum over the batch add up to it."""
    dtype = equation.outputs[0].aval.dtype
    exact = all(_widens(equation.inputs[i].aval.dtype, dtype) for i in facts_of(equation.primitive).summed)
    return exact and (accumulates(dtype) or dtype == np.float16)


def passes_parts(equation: Equation, rule: Linear, operand: DType) -> bool:
    """Return whether a linear operation on the parts of a sum of dtype `operand` gives the parts of its result."""
    dtype, precision = equation.outputs[0].aval.dtype, equation.params.get("precision")
    # An algorithm that the user names may round its operands to a narrow dtype first.
    as_it_is = precision is None or isinstance(precision, tuple)
    return _widens(operand, dtype) and (rule.moves or (accumulates(dtype) and as_it_is))


def _widens(narrow: DType, wide: DType) -> bool:
    """Return whether `wide` can represent every value of `narrow`: two inexact dtypes, or one of any kind."""
    if narrow == wide:
        return True
    if not jnp.issubdtype(narrow, jnp.inexact) or not jnp.issubdtype(wide, jnp.inexact):
        return False
    if jnp.issubdtype(narrow, jnp.complexfloating) and not jnp.issubdtype(wide, jnp.complexfloating):
        return False
    one, other = jnp.finfo(narrow), jnp.finfo(wide)
    return one.nmant <= other.nmant and one.maxexp <= other.maxexp and one.minexp >= other.minexp
