"""What keeps a sum over the batch a sum of its shards' parts: the one table of operations that a sum is deferred past.

An operation `f` is in the table only where `f(a) + f(b)` is `f(a + b)` for every `a` and `b` of the dtypes at hand, but
for the rounding that a float sum has in any order. What is not in the table is not deferred past. By dtype:

- integers add up modulo a power of two. Parts that wrap around give the total that wraps around, as long as the dtype
  stays: another integer dtype or a float tells one from the other. Integer division rounds each part.
- floats widen without loss. A narrower dtype rounds each part, and an integer or bool dtype cuts it off.
- float16 ends at 65504, which parts pass whose total does not: its sums are moved and widened, and nothing else.
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

# A dtype of JAX's: NumPy's, an ml_dtypes one, or an extended one such as that of PRNG keys.
DType = Any

_WHOLE = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_ACCUMULATED = _WHOLE | {"bfloat16", "float32", "float64", "complex64", "complex128"}
_SUMMED = _ACCUMULATED | {"float16"}


class Operands(enum.Enum):
    """Where an operation reads the sum; every other operand must be the same on all shards."""

    FIRST = enum.auto()
    EITHER = enum.auto()
    EVERY = enum.auto()
    PADDED = enum.auto()  # the first; the second, which stands where the first has nothing, must be zero


@dataclass(frozen=True)
class Linear:
    """A row of the table.

    `keeps(equation, kept)` gives the dtype that holds the parts of the result without loss, or None if these do not
    add up to the result; `kept` is that dtype of the operands' parts. It is narrower than the result's own dtype where
    the parts were widened, and they may be narrowed to it again.
    """

    operands: Operands
    keeps: Callable[[Equation, DType], DType | None]


def accumulates(dtype: DType) -> bool:
    """Whether sums of this dtype may be taken in any order and in parts."""
    return dtype.name in _ACCUMULATED


def summed_in(equation: Equation) -> DType | None:
    """The dtype that holds the parts of an equation's sum over the batch; None if these do not add up to the sum."""
    positions = _SUMS.get(equation.primitive, ())
    dtype = equation.outputs[0].aval.dtype
    exact = all(holds(equation.inputs[i].aval.dtype, dtype) for i in positions)
    return dtype if positions and exact and dtype.name in _SUMMED else None


def parts_add_up(operands: Sequence[DType], result: DType) -> bool:
    """Whether a product may sum each shard's part in the dtype of its result, and these parts in it too.

    Sums in the operands' own dtype stay as they are, float16's too: what they round and hold is what was asked for.
    """
    return all(_adds_up(dtype, result) for dtype in operands)


def _adds_up(operand: DType, result: DType) -> bool:
    if holds(operand, result):
        return True
    if not jnp.issubdtype(operand, jnp.inexact):  # integers wrap around alike everywhere, or are rounded as floats are
        return jnp.issubdtype(result, jnp.integer) or accumulates(result)
    if jnp.issubdtype(operand, jnp.complexfloating) and jnp.issubdtype(result, jnp.floating):
        return holds(jnp.finfo(operand).dtype, result)  # the real part of a sum is the sum of the real parts
    return False


def holds(narrow: DType, wide: DType) -> bool:
    """Whether every value of one dtype is a value of the other, of the same kind."""
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
    """Entries are moved, repeated, dropped or negated: exact in every dtype."""
    return kept


def _converts(equation: Equation, kept: DType) -> DType | None:
    dtype = equation.outputs[0].aval.dtype
    widens = kept == dtype or (jnp.issubdtype(kept, jnp.inexact) and holds(kept, dtype))
    return kept if widens else None


def _computes(equation: Equation, kept: DType) -> DType | None:
    """Parts are added up or multiplied, in the dtype of the result."""
    dtype = equation.outputs[0].aval.dtype
    return dtype if _converts(equation, kept) is not None and accumulates(dtype) else None


def _divides(equation: Equation, kept: DType) -> DType | None:
    return _computes(equation, kept) if jnp.issubdtype(kept, jnp.inexact) else None


def _contracts(equation: Equation, kept: DType) -> DType | None:
    """A product; an algorithm that is asked for by name may round its operands to a narrow dtype first."""
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
    primitives.transpose_p: Linear(Operands.FIRST, _moves),
}

# Which operands a sum over the batch adds up; a scatter has its indices between.
_SUMS: Mapping[Any, tuple[int, ...]] = {
    primitives.dot_general_p: (0, 1),
    primitives.reduce_sum_p: (0,),
    primitives.scatter_add_p: (0, 2),
}
