"""The linear operations: a sum over the batch stays a sum of its shards' parts. A sum is deferred past these only.

An operation `f` is in the table only if `f(a) + f(b)` is `f(a + b)` for every `a` and `b` of the dtypes at hand, apart
from the rounding that a float sum has in any order. A sum is never deferred past other operations. By dtype:

- integers add up modulo a power of two. Parts that wrap around give the total that wraps around, if the dtype stays
  the same: another integer dtype or a float shows the difference. Integer division rounds each part.
- floats widen without loss. A narrower dtype rounds each part, and an integer or bool dtype cuts it off.
- float16 ends at 65504. Parts may pass this limit although their total does not. So float16 sums may only be moved
  and widened.
- bool, the 4-bit and the 8-bit float dtypes are never summed in parts: they do not add up at all, or saturate.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from jaxpp_flax.engine.tracing.ir import Equation

__all__ = ["LINEAR", "Linear", "Operands", "accumulates", "holds", "parts_add_up", "summed_in"]

# A dtype of JAX: one of NumPy, one of ml_dtypes, or an extended dtype such as the dtype of PRNG keys.
DType = Any

_WHOLE = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_ACCUMULATED = _WHOLE | {"bfloat16", "float32", "float64", "complex64", "complex128"}
_SUMMED = _ACCUMULATED | {"float16"}


class Operands(enum.Enum):
    """The operands in which an operation reads the sum; every other operand must be the same on all shards."""

    FIRST = enum.auto()
    EITHER = enum.auto()
    EVERY = enum.auto()
    PADDED = enum.auto()  # the first; the second fills the gaps of the first, and must be zero


@dataclass(frozen=True)
class Linear:
    """A row of the table.

    `keeps(equation, kept)` gives the dtype that holds the parts of the result without loss, or None if the parts do
    not add up to the result. `kept` is the dtype that holds the operands' parts without loss. If the parts were
    widened, this dtype is narrower than the result's own dtype, and the parts may be narrowed to it again.
    """

    operands: Operands
    keeps: Callable[[Equation, DType], DType | None]


def accumulates(dtype: DType) -> bool:
    """Return whether sums of this dtype may be taken in any order and in parts."""
    return dtype.name in _ACCUMULATED


def summed_in(equation: Equation) -> DType | None:
    """Return the dtype that holds the parts of an equation's sum over the batch; None if they do not add up to it."""
    positions = _SUMS.get(equation.primitive, ())
    dtype = equation.outputs[0].aval.dtype
    exact = all(holds(equation.inputs[i].aval.dtype, dtype) for i in positions)
    return dtype if positions and exact and dtype.name in _SUMMED else None


def parts_add_up(operands: Sequence[DType], result: DType) -> bool:
    """Return whether a product may sum each shard's part, and then these parts, in the dtype of its result.

    Sums in the operands' own dtype stay as they are, float16 too: the user asked for this rounding and range.
    """
    return all(_adds_up(dtype, result) for dtype in operands)


def _adds_up(operand: DType, result: DType) -> bool:
    if holds(operand, result):
        return True
    if not jnp.issubdtype(operand, jnp.inexact):  # integers wrap around alike everywhere, or are rounded like floats
        return jnp.issubdtype(result, jnp.integer) or accumulates(result)
    if jnp.issubdtype(operand, jnp.complexfloating) and jnp.issubdtype(result, jnp.floating):
        return holds(jnp.finfo(operand).dtype, result)  # the real part of a sum is the sum of the real parts
    return False


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


def _moves(equation: Equation, kept: DType) -> DType | None:
    """Keep the dtype: entries are moved, repeated, dropped or negated, which is exact in every dtype."""
    return kept


def _converts(equation: Equation, kept: DType) -> DType | None:
    dtype = equation.outputs[0].aval.dtype
    widens = kept == dtype or (jnp.issubdtype(kept, jnp.inexact) and holds(kept, dtype))
    return kept if widens else None


def _computes(equation: Equation, kept: DType) -> DType | None:
    """Return the result's dtype, in which parts are added up or multiplied; None if it cannot hold them."""
    dtype = equation.outputs[0].aval.dtype
    return dtype if _converts(equation, kept) is not None and accumulates(dtype) else None


def _divides(equation: Equation, kept: DType) -> DType | None:
    return _computes(equation, kept) if jnp.issubdtype(kept, jnp.inexact) else None


def _contracts(equation: Equation, kept: DType) -> DType | None:
    """Treat a product; an algorithm that the user names may round its operands to a narrow dtype first."""
    precision = equation.params["precision"]
    return _computes(equation, kept) if precision is None or isinstance(precision, tuple) else None


# Keyed by the primitives themselves: a user's primitive may share a name.
LINEAR: Mapping[Any, Linear] = {
    primitives.add_jaxvals_p: Linear(Operands.EVERY, _computes),
    primitives.add_p: Linear(Operands.EVERY, _computes),
    primitives.broadcast_in_dim_p: Linear(Operands.FIRST, _moves),
    primitives.convert_element_type_p: Linear(Operands.FIRST, _converts),
    primitives.copy_p: Linear(Operands.FIRST, _moves),
    primitives.div_p: Linear(Operands.FIRST, _divides),
    primitives.dot_general_p: Linear(Operands.EITHER, _contracts),
    primitives.mul_p: Linear(Operands.EITHER, _computes),
    primitives.name_p: Linear(Operands.FIRST, _moves),
    primitives.neg_p: Linear(Operands.FIRST, _moves),
    primitives.pad_p: Linear(Operands.PADDED, _moves),
    primitives.reduce_sum_p: Linear(Operands.FIRST, _computes),
    primitives.reshape_p: Linear(Operands.FIRST, _moves),
    primitives.slice_p: Linear(Operands.FIRST, _moves),
    primitives.squeeze_p: Linear(Operands.FIRST, _moves),
    primitives.stop_gradient_p: Linear(Operands.FIRST, _moves),
    primitives.sub_p: Linear(Operands.EVERY, _computes),
    primitives.transpose_p: Linear(Operands.FIRST, _moves),
}

# The operands that a sum over the batch adds up; a scatter has its indices between them.
_SUMS: Mapping[Any, tuple[int, ...]] = {
    primitives.dot_general_p: (0, 1),
    primitives.reduce_sum_p: (0,),
    primitives.scatter_add_p: (0, 2),
}
