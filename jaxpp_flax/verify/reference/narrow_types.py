"""Casts of mixed precision, as one writes them by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["narrow", "wide"]


def narrow(tree: Any, compute: Any) -> Any:
    """Return a tree with the floats that are wider than a type in this type; None changes nothing.

    Example:
      >>> [of.dtype.name for of in narrow([jnp.ones(2), jnp.arange(2)], jnp.bfloat16)]
      ['bfloat16', 'int32']
    """
    if compute is None:
        return tree
    size = jnp.dtype(compute).itemsize
    return _cast(tree, lambda of: compute if of.itemsize > size else of)


def wide(tree: Any) -> Any:
    """Return a tree with the floats that are narrower than float32 in float32."""
    return _cast(tree, lambda of: jnp.float32 if of.itemsize < 4 else of)


def _cast(tree: Any, rule: Any) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(leaf).astype(rule(leaf.dtype))

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, nnx.Module))
