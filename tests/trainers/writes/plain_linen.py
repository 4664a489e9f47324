"""A training step of a Linen model as one writes it by Flax and Optax, for the loss `mean((outputs - 1)**2)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

__all__ = ["plain_linen_step"]


def plain_linen_step(module: nn.Module, tx: optax.GradientTransformation, collection: str) -> Callable[..., Any]:
    """Return `step(variables, opt_state, x) -> (variables, opt_state)`; a call writes into the collection."""

    @jax.jit
    def step(variables: Any, opt_state: Any, x: jax.Array) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            outputs, written = module.apply({**variables, "params": params}, x, mutable=[collection])
            return jnp.mean((outputs - 1) ** 2), written

        gradient, written = jax.grad(loss_of, has_aux=True)(variables["params"])
        updates, opt_state = tx.update(gradient, opt_state, variables["params"])
        return {**variables, **written, "params": optax.apply_updates(variables["params"], updates)}, opt_state

    return step
