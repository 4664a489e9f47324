"""Recompute a block in its backward pass, `remat=`: for functions and methods of NNX and Linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

__all__ = ["check_remat", "policy_of", "rematerialized"]


def check_remat(remat: Any, where: str) -> None:
    """Refuse a value that `remat=` does not accept.

    Raises:
      TypeError: the message begins with `where`, the place of the argument.
    """
    if remat is None or callable(remat) or (isinstance(remat, str) and remat == "full"):
        return
    raise TypeError(
        f"{where} got remat={remat!r}. Use None (keep what backward needs), 'full' (recompute everything), or a policy "
        "such as jax.checkpoint_policies.dots_saveable."
    )


def policy_of(remat: Any) -> Callable[..., bool] | None:
    """Return the policy for `jax.checkpoint`: None saves nothing."""
    return None if isinstance(remat, str) else remat


def rematerialized(function: Callable[..., Any], remat: Any) -> Callable[..., Any]:
    """Recompute `function` in backward; arguments other than arrays and modules stay Python values inside it.

    Args:
      function: a function of arrays and other values; or a method of a module, its first argument.
      remat: "full" or a policy.

    Example:
      >>> import jax.numpy as jnp
      >>> def block(w, x, activation):
      ...     return getattr(jnp, activation)(x @ w)
      >>> rematerialized(block, "full")(jnp.eye(2), jnp.zeros((1, 2)), "tanh").shape
      (1, 2)
    """
    policy = policy_of(remat)

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = args[:1] if args and isinstance(args[0], (nn.Module, nnx.Module)) else ()
        leaves, tree = jax.tree.flatten((args[len(owner) :], kwargs), is_leaf=_is_graph_node)
        dynamic = [i for i, leaf in enumerate(leaves) if _is_dynamic(leaf)]

        def run(*operands: Any) -> Any:
            module, values = operands[:-1], operands[-1]
            merged = list(leaves)
            for i, value in zip(dynamic, values, strict=True):
                merged[i] = value
            positional, named = jax.tree.unflatten(tree, merged)
            return function(*module, *positional, **named)

        values = [leaves[i] for i in dynamic]
        if owner and isinstance(owner[0], nn.Module):
            return nn.remat(run, policy=policy)(owner[0], values)
        if owner or any(map(_is_graph_node, values)):
            return nnx.remat(run, policy=policy)(*owner, values)
        return jax.checkpoint(run, policy=policy)(values)

    return call


def _is_graph_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Module, nnx.Variable, nnx.Rngs))


def _is_dynamic(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) or _is_graph_node(leaf)
