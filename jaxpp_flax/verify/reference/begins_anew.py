"""Which variables begin anew in each part of a batch: found by calls that differ in one thing, and from no trace.

Plain Flax calls the model once a step, with the whole batch. A value that is computed of parameters, such as the
vectors of a spectral norm or a teacher's average, is then written once. So if the batch is in parts, each part begins
with the value before the step. What depends on the examples, or on itself alone, such as a counter, goes from part to
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.verify.rounding import apart, is_float

__all__ = ["begins_anew", "stirred"]

Call = Callable[[Any, Sequence[Any], Any, int], Sequence[Any]]
"""Takes parameters, other leaves, a part of a batch and its number; returns the other leaves after the call."""


def begins_anew(
    call: Call, params: Any, leaves: Sequence[Any], parts: Sequence[Any], is_parameter: Sequence[bool]
) -> tuple[int, ...]:
    """Return the positions of the leaves that begin anew in each part.

    Args:
      call: the model's call.
      params, leaves: the trained parameters, and what else the model holds, before the step.
      parts: at least two parts of the batch.
      is_parameter: for each of `leaves`, whether it is a parameter that is not trained.

    Example:
      >>> def call(kernel, leaves, part, number):
      ...     vector, mean, count = leaves
      ...     return [kernel @ vector, mean + part.mean(), count + 1]
      >>> before = [np.ones(2), np.ones(()), np.ones((), int)]
      >>> begins_anew(call, np.eye(2), before, [np.ones(3)] * 2, [False] * 3)
      (0,)
    """
    first = call(params, leaves, parts[0], 0)
    every = set(range(len(leaves)))

    def changed(params: Any, at: Iterable[int] = ()) -> set[int]:
        """Return which leaves the call writes otherwise if these parameters and the leaves at these places differ."""
        moved = [stirred(leaf) if i in at else leaf for i, leaf in enumerate(leaves)]
        return _differing(first, call(params, moved, parts[0], 0))

    varying = _differing(first, call(params, leaves, parts[1], 1))
    varying |= _differing(first, call(params, leaves, stirred(parts[0]), 1))  # the parts may be equal
    while more := (changed(params, varying) if varying else set[int]()) - varying:
        varying |= more
    still, own = every - varying, {i for i in every if is_parameter[i]}
    anew = still & (changed(stirred(params), own) | own)
    written = _differing(leaves, first)
    while more := {i for i in (still & written) - anew if anew & changed(params, {i})}:  # of what these are computed
        anew |= more
    return tuple(sorted(anew))


def stirred(tree: Any) -> Any:
    """Return a tree of other numbers: no leaf, but keys, is as it was.

    Example:
      >>> [bool((new != old).all()) for old in (np.ones(3), np.arange(3)) for new in [stirred(old)]]
      [True, True]
    """
    numbers = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if not is_float(leaf):
            return (leaf == 0).astype(leaf.dtype)
        return (leaf * numbers.uniform(0.5, 1.5, leaf.shape) + 0.1).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def _differing(one: Sequence[Any], other: Sequence[Any]) -> set[int]:
    return {i for i, (a, b) in enumerate(zip(one, other, strict=True)) if apart(a, b).any()}
