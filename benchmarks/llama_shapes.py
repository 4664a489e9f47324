"""Llama 3 in the shapes of 8B and 70B, of the usual parts, annotated for the axes `fsdp` and `tensor`: for compilers.

Grouped heads, rotary positions, a gated MLP, each block recomputed in the backward (or not), computation in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from jaxpp_flax import PipelineStage

BF16 = jnp.bfloat16
RULES = (("batch", ("data", "fsdp")), ("fsdp", ("fsdp",)), ("tensor", ("tensor",)))


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `length` is the number of tokens of an example; `recompute`: each block in its backward."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int = 8
    vocabulary: int = 128256
    length: int = 8192
    recompute: bool = True


SHAPES = {
    "tiny": Shape(width=64, hidden=128, layers=2, heads=4, key_value_heads=2, vocabulary=256, length=32),
    "1b": Shape(width=2048, hidden=8192, layers=16, heads=32),
    "8b": Shape(width=4096, hidden=14336, layers=32, heads=32),
    "70b": Shape(width=8192, hidden=28672, layers=80, heads=64),
}


def dense(inputs: int, outputs: int, cut: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), cut)
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=BF16, kernel_init=init, rngs=rngs)


def rotated(x: jax.Array) -> jax.Array:
    """Rotate halves of each head, (batch, length, heads, size), by the angles of its position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / 500_000.0 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def by_examples(x: jax.Array) -> jax.Array:
    """Let devices share the examples of activations, so that XLA gathers weights over `fsdp` and not the examples."""
    return with_logical_constraint(x, ("batch", None, None))


class Block(nnx.Module):
    """A layer, cut as Megatron cuts it: the first products by columns, the second ones by rows."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.size, self.recompute = shape.width // shape.heads, shape.recompute
        columns, rows = ("fsdp", "tensor"), ("tensor", "fsdp")
        self.norm1, self.norm2 = (nnx.RMSNorm(shape.width, dtype=BF16, rngs=rngs) for _ in range(2))
        self.query, self.out = (
            dense(shape.width, shape.width, columns, rngs),
            dense(shape.width, shape.width, rows, rngs),
        )
        self.key, self.value = (dense(shape.width, shape.key_value_heads * self.size, columns, rngs) for _ in range(2))
        self.gate, self.up = (dense(shape.width, shape.hidden, columns, rngs) for _ in range(2))
        self.down = dense(shape.hidden, shape.width, rows, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (nnx.remat(Block.layer) if self.recompute else Block.layer)(self, x)

    def layer(self, x: jax.Array) -> jax.Array:
        y = by_examples(self.norm1(x))
        query, key, value = (f(y).reshape(*x.shape[:2], -1, self.size) for f in (self.query, self.key, self.value))
        seen = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = by_examples(x + self.out(seen.reshape(x.shape)))
        y = by_examples(self.norm2(x))
        return by_examples(x + self.down(nnx.silu(self.gate(y)) * self.up(y)))


class Llama(nnx.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        table = nnx.with_partitioning(nnx.initializers.normal(0.02), ("tensor", "fsdp"))
        self.embed = nnx.Embed(shape.vocabulary, shape.width, dtype=BF16, embedding_init=table, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(shape, rngs), name=f"block_{i}") for i in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.width, dtype=BF16, rngs=rngs)
        self.head = dense(shape.width, shape.vocabulary, ("fsdp", "tensor"), rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = by_examples(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(by_examples(self.norm(x)))


def loss_fn(model: Llama, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def tokens_of(shape: Shape, examples: int) -> dict[str, jax.ShapeDtypeStruct]:
    ids = jax.ShapeDtypeStruct((examples, shape.length), jnp.int32)
    return {"tokens": ids, "targets": ids}
