"""A model that computes in a narrower type than its stored parameters have."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["calling_in", "narrowed", "widened"]


def narrowed(tree: Any, compute: Any) -> Any:
    """Convert the floating arrays of a tree that are wider than `compute` to this type; None converts nothing.

    Example:
      >>> x = narrowed({"x": jnp.ones(2), "ids": jnp.arange(2), "flag": True}, jnp.bfloat16)
      >>> x["x"].dtype, x["ids"].dtype, x["flag"]
      (dtype(bfloat16), dtype('int32'), True)
    """
    if compute is None:
        return tree
    bits = jnp.finfo(compute).bits
    return _converted(tree, lambda dtype: compute if jnp.finfo(dtype).bits > bits else dtype)


def widened(tree: Any) -> Any:
    """Convert the floating arrays of a tree that are narrower than float32 to float32."""
    return _converted(tree, lambda dtype: jnp.promote_types(dtype, jnp.float32))


def _converted(tree: Any, rule: Any) -> Any:
    def one(leaf: Any) -> Any:
        is_float = isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, rule(leaf.dtype)) if is_float else leaf

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, nnx.Module))  # a module is no value


def calling_in(module: nnx.Module, compute: Any) -> nnx.Module:
    """Let a module's call take its inputs in `compute` and return float32; the module is still one of its class.

    An `nnx.Embed` that names no type notes that of its stored parameters as its own, in which it would widen all that
    follows. Its parameters are converted, and it computes in their type.
    """
    if compute is None:
        return module
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Embed) and part.dtype == part.param_dtype:
            part.dtype = None
    if callable(module):
        module.__class__ = _class_calling_in(type(module), compute)
    return module


@functools.cache
def _class_calling_in(kind: Any, compute: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = narrowed((args, kwargs), compute)
        return widened(kind.__call__(self, *args, **kwargs))

    return type(kind)(kind.__name__, (kind,), {"__call__": functools.wraps(kind.__call__)(call)})
