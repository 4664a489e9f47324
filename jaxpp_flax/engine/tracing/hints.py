"""Hints about placement: values that go with another array, and sums that mix ranks on purpose.

A hint never changes a result. Under plain `jax.jit` a hint has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jaxpp_flax._compat_texts.traces import scopes_of
from jaxpp_flax.engine.tracing.ir import Equation, emit

__all__ = ["MIXING_SCOPE", "as_copy", "is_mixing_by_design", "place_with", "place_with_p"]

T = TypeVar("T")

# Equations under this name scope mix ranks because the user asked for it: no warning is due.
MIXING_SCOPE = "cross_mpmd"

place_with_p = jex_core.Primitive("place_with")
place_with_p.def_impl(lambda value, like: value)
place_with_p.def_abstract_eval(lambda value, like: value)
mlir.register_lowering(place_with_p, lambda ctx, value, like: [value])


# A tangent is made on its primal's stage: it needs no hint.
ad.primitive_jvps[place_with_p] = lambda primals, tangents: (place_with_p.bind(*primals), tangents[0])
batching.primitive_batchers[place_with_p] = lambda operands, dims: (place_with_p.bind(*operands), dims[0])


def place_with(value: T, like: Any) -> T:
    """Ask that `value` is computed on the ranks that hold `like`.

    The hint is for work before and after the loop: without it, a value that no stage needs goes to rank 0. Inside the
    loop's body the hint has no effect, because every stage computes the values that it uses. A value that the loop
    reads is made on the ranks that read it.

    Args:
      value: a pytree of arrays, of any shapes and dtypes.
      like: an array, or a pytree; its first leaf is used.

    Returns:
      `value`, unchanged.

    Raises:
      ValueError: if `like` holds no array.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jax.jit(lambda x, w: place_with(x + 1, w))(jnp.ones(2), jnp.ones((3, 3)))
      Array([2., 2.], dtype=float32)
    """
    leaves = jax.tree.leaves(like)
    if not leaves:
        raise ValueError(f"place_with got no array to place beside: `like` is {like!r}. Pass a parameter of the rank.")
    return jax.tree.map(lambda leaf: place_with_p.bind(leaf, leaves[0]), value)


def as_copy(hint: Equation) -> Equation:
    """Turn a `place_with` that is already applied into a plain copy of its value."""
    (copy,), _ = emit(jax.lax.copy_p.bind, hint.inputs[:1], hint.outputs)
    return replace(copy, source=hint.source)


def is_mixing_by_design(equation: Equation) -> bool:
    """Return whether the user asked, by a name scope, for this work on several ranks' arrays."""
    return MIXING_SCOPE in scopes_of(equation.source)
