"""The dtypes in which a sum over the batch is the sum of its shards' parts. A sum is deferred past these only.

An operation `f` is linear in `tracing/primitives.py` only if `f(a) + f(b)` is `f(a + b)` for every `a` and `b` of the
dtypes at hand, apart from the rounding that a float sum has in any order. A sum is never deferred past other
operations. By dtype:

- integers add up modulo a power of two. Parts that wrap around give the total that wraps around, if the dtype stays
  the same: another integer dtype or a float shows the difference. Integer division rounds each part.
- floats widen without loss. A narrower dtype rounds each part, and an integer or bool dtype cuts it off.
- float16 ends at 65504. Parts may pass this limit although their total does not. So float16 sums may only be moved
  and widened.
- bool, the 4-bit and the 8-bit float dtypes are never summed in parts: they do not add up at all, or saturate.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.ir import Equation
from jaxpp_flax.engine.tracing.primitives import Parts, facts_of

__all__ = ["accumulates", "holds", "kept_after", "summed_in"]

# A dtype of JAX: one of NumPy, one of ml_dtypes, or an extended dtype such as the dtype of PRNG keys.
DType = Any

_WHOLE = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_ACCUMULATED = _WHOLE | {"bfloat16", "float32", "float64", "complex64", "complex128"}


def accumulates(dtype: DType) -> bool:
    """Return whether sums of this dtype may be taken in any order and in parts."""
    return dtype.name in _ACCUMULATED


def summed_in(equation: Equation) -> DType | None:
    """Return the dtype that holds the parts of an equation's sum over the batch; None if they do not add up to it."""
    dtype = equation.outputs[0].aval.dtype
    exact = all(holds(equation.inputs[i].aval.dtype, dtype) for i in facts_of(equation.primitive).summed)
    return dtype if exact and (accumulates(dtype) or dtype == np.float16) else None


def holds(narrow: DType, wide: DType) -> bool:
    """Return whether `wide` can represent every value of `narrow`, and is of the same kind."""
    if narrow == wide:
        return True
    if jnp.issubdtype(narrow, jnp.integer) and jnp.issubdtype(wide, jnp.integer):
        return np.can_cast(narrow, wide)
    if not jnp.issubdtype(narrow, jnp.inexact) or not jnp.issubdtype(wide, jnp.inexact):
        return False
    if jnp.issubdtype(narrow, jnp.complexfloating) and not jnp.issubdtype(wide, jnp.complexfloating):
        return False
    one, other = jnp.finfo(narrow), jnp.finfo(wide)
    return one.nmant <= other.nmant and one.maxexp <= other.maxexp and one.minexp >= other.minexp


def kept_after(equation: Equation, parts: Parts, kept: DType) -> DType | None:
    """Return the dtype that holds the parts of a result without loss, or None if they do not add up to the result.

    Args:
      equation: a linear operation on a sum.
      parts: what it does with the parts of the sum.
      kept: the dtype that holds the operands' parts without loss. If the parts were widened, it is narrower than the
        result's own dtype, and the parts may be narrowed to it again.
    """
    dtype = equation.outputs[0].aval.dtype
    inexact = jnp.issubdtype(kept, jnp.inexact)
    if parts is Parts.MOVED:
        return kept
    if kept != dtype and not (inexact and holds(kept, dtype)):
        return None
    if parts is Parts.CONVERTED:
        return kept
    if parts is Parts.DIVIDED and not inexact:
        return None
    precision = equation.params.get("precision")
    if parts is Parts.CONTRACTED and not (precision is None or isinstance(precision, tuple)):
        return None  # an algorithm that the user names may round its operands to a narrow dtype first
    return dtype if accumulates(dtype) else None
