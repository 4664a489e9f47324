"""Combine values of several ranks into one: their sum, and their stack."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.tracing.hints import MIXING_SCOPE

__all__ = ["cross_mpmd_all_reduce", "cross_mpmd_stack"]


def cross_mpmd_all_reduce(*args: Any) -> jax.Array:
    """Add arrays that live on different ranks, in the given order.

    Scalars are sent to every rank that reads the sum, and added there. Larger arrays are added on one rank; the sum is
    sent to the ranks that read it. Plain `+` gives the same result, but may warn that it mixes ranks.

    Args:
      *args: arrays of one dtype and one shape, each from any rank.

    Returns:
      The sum, of the same dtype and shape.

    Raises:
      ValueError: if there are no arrays.
      TypeError: if dtypes or shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> float(cross_mpmd_all_reduce(jnp.float32(1), jnp.float32(2), jnp.float32(3)))
      6.0
    """
    _check_alike("cross_mpmd_all_reduce", args)
    with jax.named_scope(MIXING_SCOPE):
        return jnp.asarray(functools.reduce(operator.add, args))


def cross_mpmd_stack(arrays: Sequence[Any], axis: int = 0) -> jax.Array:
    """Stack arrays that live on different ranks along a new axis.

    Args:
      arrays: of one dtype and one shape, each from any rank.
      axis: the position of the new axis in the result.

    Returns:
      The stack. It is made on every rank that reads it; a large stack is made on one rank, and sent.

    Raises:
      ValueError: if there are no arrays.
      TypeError: if dtypes or shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> cross_mpmd_stack([jnp.ones(2), jnp.zeros(2)], axis=1).shape
      (2, 2)
    """
    _check_alike("cross_mpmd_stack", arrays)
    with jax.named_scope(MIXING_SCOPE):
        return jnp.stack(list(arrays), axis=axis)


def _check_alike(function: str, arrays: Sequence[Any]) -> None:
    if not len(arrays):
        raise ValueError(f"{function} got no array. Pass one array for each rank.")
    types = [f"{jnp.result_type(a)}{list(jnp.shape(a))}" for a in arrays]
    for position, array_type in enumerate(types):
        if array_type != types[0]:
            raise TypeError(
                f"{function}: array {position} is {array_type}, array 0 is {types[0]}. All of them need one dtype and "
                "one shape: cast or reshape them first."
            )
