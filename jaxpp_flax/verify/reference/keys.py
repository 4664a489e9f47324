"""The keys of random numbers that a step documents: those of the model, folded with the step and the microbatch.

The rule stands here a second time, since the reference shares nothing with the trainer: `trainers/model/adapter.py` and
the two adapters beside it have the first.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax

__all__ = ["keys_of", "linen_keys"]


def keys_of(keys: jax.Array, *numbers: Any) -> jax.Array:
    """Return a key, or an array of keys, folded with numbers.

    Example:
      >>> bool((keys_of(jax.random.key(0), 2) == jax.random.fold_in(jax.random.key(0), 2)).all())
      True
    """
    fold_in = jax.random.fold_in
    for _ in range(keys.ndim):
        fold_in = jax.vmap(fold_in, in_axes=(0, None))
    for number in numbers:
        keys = fold_in(keys, number)
    return keys


def linen_keys(key: jax.Array, step: Any, microbatch: Any) -> dict[str, jax.Array]:
    """Return the keys of a Linen model's streams."""
    folded = keys_of(key, step, microbatch)
    return {name: jax.random.fold_in(folded, zlib.crc32(name.encode()) & 0x7FFFFFFF) for name in ("params", "dropout")}
