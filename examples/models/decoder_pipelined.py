"""A decoder-only transformer in NNX: tokens (batch, length), 0 for padding, to logits of the next token."""

import dataclasses

import jax.numpy as jnp
import optax
from flax import nnx

from jaxpp_flax import pipeline_stage


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    vocabulary: int = 256
    width: int = 64
    hidden: int = 256
    heads: int = 4
    layers: int = 4
    length: int = 64


class MlpBlock(nnx.Module):
    def __init__(self, config, *, rngs):
        self.dense1 = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.dense2 = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x):
        return self.dense2(nnx.relu(self.dense1(x)))


@pipeline_stage
class DecoderBlock(nnx.Module):
    def __init__(self, config, *, rngs):
        self.norm1 = nnx.LayerNorm(config.width, use_bias=False, rngs=rngs)
        self.self_attention = nnx.MultiHeadAttention(
            num_heads=config.heads, in_features=config.width, use_bias=False, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(config.width, use_bias=False, rngs=rngs)
        self.mlp = MlpBlock(config, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.self_attention(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class TransformerLM(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.position = nnx.Embed(config.length, config.width, rngs=rngs)
        for i in range(config.layers):
            setattr(self, f"block_{i}", DecoderBlock(config, rngs=rngs))
        self.norm = nnx.LayerNorm(config.width, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.combine_masks(nnx.make_causal_mask(tokens), nnx.make_attention_mask(tokens > 0, tokens > 0))
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for i in range(self.config.layers):
            x = getattr(self, f"block_{i}")(x, mask)
        return self.embed.attend(self.norm(x))  # the embedding is the output layer, too


def loss_fn(model, batch):
    logits = model(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = (batch["targets"] > 0).astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()
