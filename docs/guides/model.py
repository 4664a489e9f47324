"""The model of the trainer's pages."""

import jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jaxpp_flax import PipelineStage


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.blocks = nnx.List(
            [PipelineStage(Block(rngs=rngs), name=f"block_{i}") for i in range(4)]
        )
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["targets"]
    ).mean()


tokens = [
    np.random.default_rng(seed).integers(0, 16, (32, 6)).astype(np.int32)
    for seed in range(3)
]
batches = [{"tokens": each, "targets": each} for each in tokens]
