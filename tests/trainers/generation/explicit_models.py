"""Small models whose cache is an argument and a result: attention, a recurrence as in Mamba, and one of Linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage
from jaxpp_flax.trainers import ExplicitCache, NextTokens
from tests.trainers.generation.models import POSITIONS, VOCABULARY, WIDTH

HEADS, STATES, TAPS = 2, 3, 3
SIZE = WIDTH // HEADS


def mix(query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Attention of (batch, n, width), with heads."""
    heads = [x.reshape(*x.shape[:2], HEADS, SIZE) for x in (query, key, value)]
    return jax.nn.dot_product_attention(*heads, mask=mask[:, None]).reshape(query.shape)


class AttentionBlock(nnx.Module):
    """Its cache counts its slots, in each sequence, and passes through the mark of the block."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any, mask: Any, slot: Any, cache: Any) -> tuple[Any, Any]:
        query, key, value = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        if cache is not None:
            *kept, count = cache
            new = zip(kept, (key, value), strict=True)
            key, value = (jax.lax.dynamic_update_slice_in_dim(old, one, count[0], axis=1) for old, one in new)
            cache = (key, value, count + x.shape[1])
        return x + self.dropout(self.out(mix(query, key, value, mask))), cache


class RecurrentBlock(nnx.Module):
    """A causal convolution of each feature, then states that decay by what the input says."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.taps = nnx.Param(jax.random.normal(rngs.params(), (TAPS, WIDTH)))
        self.decay, self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.write, self.read = nnx.Linear(WIDTH, STATES, rngs=rngs), nnx.Linear(WIDTH, STATES, rngs=rngs)

    def __call__(self, x: Any, is_token: Any, slot: Any, cache: Any) -> tuple[Any, Any]:
        earlier, state = no_state(len(x)) if cache is None else cache

        def step(carry: Any, now: Any) -> Any:
            window, state = carry
            u, real = now
            window_now = jnp.concatenate([window, u[:, None]], axis=1)
            y = jnp.einsum("btd,td->bd", window_now, self.taps[...])
            decay = jax.nn.sigmoid(self.decay(y))[..., None]
            state_now = decay * state + y[..., None] * self.write(y)[:, None]
            out = (state_now * self.read(y)[:, None]).sum(-1) * jax.nn.silu(self.gate(u))
            keep = lambda new, old: jnp.where(real[:, None, None], new, old)  # noqa: E731
            return (keep(window_now[:, 1:], window), keep(state_now, state)), out

        steps = (jnp.moveaxis(self.norm(x), 1, 0), jnp.moveaxis(is_token, 1, 0))
        cache, out = jax.lax.scan(step, (earlier, state), steps)
        return x + jnp.moveaxis(out, 0, 1), cache


def no_state(rows: int) -> Any:
    return jnp.zeros((rows, TAPS - 1, WIDTH)), jnp.zeros((rows, WIDTH, STATES))


class Stack(nnx.Module):
    """Blocks of one kind between an embedding and a head; `model(tokens)` is the plain model."""

    def __init__(self, block: Any, rngs: nnx.Rngs, num_blocks: int = 2):
        normal = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs, embedding_init=normal)
        self.table = nnx.Embed(POSITIONS, WIDTH, rngs=rngs, embedding_init=normal)
        self.blocks = nnx.List([PipelineStage(block(rngs)) for _ in range(num_blocks)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs, kernel_init=normal)
        self.attends = block is AttentionBlock

    def __call__(self, tokens: Any, inputs: NextTokens | None = None, cache: Any = None) -> Any:
        rows, count = tokens.shape
        if inputs is None:
            positions, slot = jnp.arange(count)[None], 0
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (rows, count, count))
            seen = mask if self.attends else jnp.ones((rows, count), bool)
        else:
            positions, slot = inputs.positions, inputs.slot
            seen = inputs.mask if self.attends else inputs.is_token
        x, after = self.embed(tokens) + self.table(positions), []
        for i, block in enumerate(self.blocks):
            x, new = block(x, seen, slot, None if cache is None else cache[i])
            after.append(new)
        return self.head(x) if inputs is None else (self.head(x), after)


def init_keys(model: Any, rows: int, length: int) -> Any:
    if length > POSITIONS:
        raise ValueError(f"there are {POSITIONS} positions")
    return [(*jnp.zeros((2, rows, length, WIDTH)), jnp.zeros(rows, jnp.int32)) for _ in model.blocks]


def init_states(model: Any, rows: int, length: int) -> Any:
    return [no_state(rows) for _ in model.blocks]


def apply(model: Any, inputs: NextTokens, cache: Any) -> Any:
    return model(inputs.tokens, inputs, cache)


class LinenAttention(nn.Module):
    """A Linen block with the same cache."""

    @nn.compact
    def __call__(self, x: Any, mask: Any, slot: Any, cache: Any) -> tuple[Any, Any]:
        query, key, value = jnp.split(nn.Dense(3 * WIDTH)(nn.LayerNorm()(x)), 3, axis=-1)
        if cache is not None:
            new = zip(cache, (key, value), strict=True)
            key, value = cache = tuple(jax.lax.dynamic_update_slice_in_dim(old, one, slot, axis=1) for old, one in new)
        return x + nn.Dense(WIDTH)(mix(query, key, value, mask)), cache


class LinenStack(nn.Module):
    num_blocks: int = 2

    @nn.compact
    def __call__(self, tokens: Any, inputs: NextTokens | None = None, cache: Any = None) -> Any:
        rows, count = tokens.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (rows, count, count))
        positions, slot = jnp.arange(count)[None], 0
        if inputs is not None:
            positions, slot, mask = inputs.positions, inputs.slot, inputs.mask
        normal = nn.initializers.normal(1.0)
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=normal)(tokens) + nn.Embed(POSITIONS, WIDTH)(positions)
        after = []
        for i in range(self.num_blocks):
            x, new = linen_pipeline.PipelineStage(LinenAttention())(x, mask, slot, None if cache is None else cache[i])
            after.append(new)
        logits = nn.Dense(VOCABULARY, kernel_init=normal)(x)
        return logits if inputs is None else (logits, after)


def init_linen(model: Any, rows: int, length: int) -> Any:
    return [tuple(jnp.zeros((2, rows, length, WIDTH))) for _ in range(model.module.num_blocks)]


KEYS = ExplicitCache(init_cache=init_keys, apply=apply)
STATE = ExplicitCache(init_cache=init_states, apply=apply)
LINEN = ExplicitCache(init_cache=init_linen, apply=apply)
