"""The model of the page on Linen."""

import jax.numpy as jnp
from flax import linen as nn
import jaxpp_flax.linen as pipeline


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x, training=True):
        for i in range(2):
            dense = nn.Dense(8)  # params: Dense_0, Dense_1
            x = pipeline.PipelineStage(dense, name=f"block_{i}")(x)
            x = nn.Dropout(0.1, deterministic=not training)(jnp.tanh(x))
        return nn.Dense(1)(x)


def linen_loss(model, batch):
    return jnp.mean((model(batch["x"], training=model.training) - batch["y"]) ** 2)
