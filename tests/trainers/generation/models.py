"""Small language models with a cache, and the plain reference: the whole sequence again for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage

WIDTH, VOCABULARY, POSITIONS = 8, 13, 16
PROMPTS, NEW = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2], [3, 1, 4, 1]], 6


class Positions(nnx.Module):
    """Learned positions, with the next position as a cache."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(POSITIONS, WIDTH, rngs=rngs)
        self.decode = False

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        if input_shape[1] > POSITIONS:
            raise ValueError(f"there are {POSITIONS} positions")
        self.position = nnx.Cache(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        first = 0
        if self.decode:
            first = self.position[...]
            self.position[...] = first + x.shape[1]
        return x + self.table(first + jnp.arange(x.shape[1]))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, dropout: float):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, in_features=WIDTH, decode=False, deterministic=False, dropout_rate=dropout, rngs=rngs
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = None if self.attention.decode else nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.dropout(jnp.tanh(self.mlp(x)))


class GPT(nnx.Module):
    """Attention of Flax, learned positions, dropout."""

    def __init__(self, rngs: nnx.Rngs, num_blocks: int = 4, dropout: float = 0.1):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs, embedding_init=nnx.initializers.normal(1.0))
        self.positions = Positions(rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(rngs=rngs, dropout=dropout)) for _ in range(num_blocks)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs, kernel_init=nnx.initializers.normal(1.0))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.positions(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = None if self.decode else nn.make_causal_mask(jnp.ones(x.shape[:2]))
        return x + nn.MultiHeadDotProductAttention(2, decode=self.decode)(nn.LayerNorm()(x), mask=mask)


class LinenGPT(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, training: bool = True) -> jax.Array:
        x, first = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(1.0))(tokens), 0
        if self.decode:
            is_made = self.has_variable("cache", "position")
            position = self.variable("cache", "position", lambda: jnp.int32(0))
            first = position.value
            if is_made:
                position.value = first + tokens.shape[1]
        x = x + nn.Embed(POSITIONS, WIDTH)(first + jnp.arange(tokens.shape[1]))
        x = nn.Dropout(0.1, deterministic=not training)(x)
        for _ in range(2):
            x = linen_pipeline.PipelineStage(LinenBlock(self.decode))(x)
        return nn.Dense(VOCABULARY, kernel_init=nn.initializers.normal(1.0))(x)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def greedy(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[np.ndarray]:
    """Continue each prompt by the most likely tokens under plain `jax.jit`, without a cache, one sequence at a time.

    The sequence is padded on the right to one length, so that one program serves all: attention is causal.
    """
    model.eval()
    graphdef, state = nnx.split(model)
    return greedy_of(lambda tokens: nnx.merge(graphdef, state)(tokens), prompts, max_new_tokens)


def greedy_of(function: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[np.ndarray]:
    """`greedy` for a function from tokens to logits."""
    length, logits, found = max(map(len, prompts)) + max_new_tokens, jax.jit(function), []
    for prompt in prompts:
        row = np.zeros((1, length), np.int32)
        row[0, : len(prompt)] = prompt
        for position in range(len(prompt), len(prompt) + max_new_tokens):
            row[0, position] = int(jnp.argmax(logits(row)[0, position - 1]))
        found.append(row[0, len(prompt) : len(prompt) + max_new_tokens])
    return found


def assert_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    assert all(row.dtype == np.int32 for row in found)
