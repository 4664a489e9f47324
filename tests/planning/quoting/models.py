"""A small annotated model, and its factory as a quote takes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer


def dense(inputs: int, outputs: int, cut: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=nnx.with_partitioning(nnx.initializers.normal(), cut), rngs=rngs
    )


class Block(nnx.Module):
    """Two products, cut as Megatron cuts them."""

    def __init__(self, width: int, axis: str, rngs: nnx.Rngs) -> None:
        self.up, self.down = (dense(width, 4 * width, ("fsdp", "tensor"), rngs),
                              dense(4 * width, width, (axis, "fsdp"), rngs))  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, layers: int, width: int, axis: str, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(width, width, rngs=rngs)
        blocks = (Block(width, axis, rngs) for _ in range(layers))
        self.blocks = nnx.List([PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Model, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def make(
    layers: int = 7, batch: int = 48, width: int = 16, axis: str = "tensor", loss_fn: Any = loss, **options: Any
) -> tuple[PipelineTrainer, Any]:
    """Make the trainer and the shapes of a batch; `axis` cuts the second product."""
    trainer = PipelineTrainer(
        lambda rngs: Model(layers, width, axis, rngs), optax.adam(1e-3), loss_fn, logging=False, **options
    )
    return trainer, jax.ShapeDtypeStruct((batch, width), jnp.float32)
