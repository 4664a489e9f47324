"""How far two runs of one step may be apart: measured on the plain step, and never a constant of ours but one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import is_key

__all__ = ["FACTOR", "apart", "is_float", "moved", "on_host", "spread", "unit_of", "wide"]

FACTOR = 16.0
"""A difference is more than rounding explains if it is this many times the spread of the plain step.

The spread is that of two runs, a sample: over a leaf of a few numbers, a third run is often some times as far away.
"""


def on_host(leaf: Any) -> Any:
    """Return a copy of an array in NumPy; of random keys, a copy that `jax.random` takes."""
    if not is_key(leaf):
        return np.array(leaf)
    keys = jnp.asarray(leaf)
    return jax.random.wrap_key_data(jnp.array(jax.random.key_data(keys)), impl=jax.random.key_impl(keys))


def is_float(array: Any) -> bool:
    """Return True for arrays of floating or complex numbers."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def wide(array: Any) -> np.ndarray:
    """Return an array in double precision, in which differences are taken; random keys as their bits."""
    if is_key(array):
        array = jax.random.key_data(jnp.asarray(array))
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def moved(
    arrays: Mapping[Any, Any], rounding: float, seed: int, spreads: Mapping[Any, float] | None = None
) -> dict[Any, Any]:
    """Return arrays whose floats are moved by one unit of rounding, up or down; `rounding` is the unit of 1.

    `spreads` has how far apart rounding leaves all numbers of an array beside.

    Example:
      >>> moved({"x": np.float32([1.0, 2.0])}, 0.5, seed=0)
      {'x': array([1.5, 3. ], dtype=float32)}
    """
    numbers = np.random.default_rng(seed)

    def one(name: Any, leaf: Any) -> Any:
        if is_key(leaf) or not is_float(leaf):
            return leaf
        unit = max(rounding, float(jnp.finfo(leaf.dtype).eps))
        steps = numbers.choice([-1.0, 1.0], leaf.shape)
        return np.asarray(leaf + steps * (unit * np.abs(leaf) + (spreads or {}).get(name, 0.0)), leaf.dtype)

    return {name: one(name, leaf) for name, leaf in arrays.items()}


def apart(one: Any, other: Any) -> np.ndarray:
    """Return how far two arrays are apart, number by number; infinities and NaN at equal places are equal.

    Example:
      >>> apart(np.float32([1, np.nan, 2]), np.float32([1, np.nan, np.inf])).tolist()
      [0.0, 0.0, inf]
    """
    a, b = wide(one), wide(other)
    with np.errstate(invalid="ignore"):
        found = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(found), np.inf, found)


def unit_of(array: Any) -> float:
    """Return the unit of rounding of a leaf: that of its largest finite number; 0 for what is not rounded.

    Example:
      >>> unit_of(np.float32([0.1, 5.0])) == 4 * float(np.finfo(np.float32).eps)
      True
    """
    if is_key(array) or not is_float(array):
        return 0.0
    finite = np.abs(wide(array))
    largest = float(finite[np.isfinite(finite)].max(initial=0.0))
    return float(jnp.finfo(array.dtype).eps) * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0


def spread(expected: Any, others: Iterable[Any]) -> float:
    """Return the largest difference between a run and others of the same step; 0 for what has no finite one."""
    found = [apart(expected, other) for other in others]
    return max((float(x[np.isfinite(x)].max(initial=0.0)) for x in found), default=0.0)
