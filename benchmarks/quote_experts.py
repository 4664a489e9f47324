"""How far a quote is from a published step of a mixture of experts; the curves are not fitted to it.

    python benchmarks/quote_experts.py

Measured: marin's Snowball, 67B parameters of which 2B compute a token, on 64 H100 (`experiments/grug/moe_pipeline`,
September 2026): DualPipeV of 16 stages on 8 ranks, an expert axis of 8 in each node that cuts the examples too, 256
examples of 8,192 tokens in 32 microbatches, bfloat16 throughout, every layer recomputed, AdamW. Here experts get even
shares by an all-to-all; there each device gathers all tokens of its node, and sums what comes back. Attention looks
back at 1,024 to 2,047 tokens here, there at 1,023 or 2,047. Stages are balanced by the quote, there by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.linen.spmd import with_logical_constraint

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import Curves, Quoter, device_named
from jaxpp_flax.planning.quoting.layouts import Layout
from jaxpp_flax.planning.quoting.traced import trace_model

BF16 = jnp.bfloat16
HIDDEN, HEADS, GROUPS, WIDE, SHARED, LAYERS, VOCABULARY = 2560, 20, 5, 1280, 2560, 26, 128256
EXPERTS, CHOSEN, WINDOW, SEQUENCE, BATCH, CHUNK = 256, 4, 1024, 8192, 256, 1024
RULES = (("batch", ("data", "fsdp", "expert")), ("experts", "expert"))
MEASURED_SECONDS, MEASURED_BYTES = 3.476, 59.153e9


def dense(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=BF16, param_dtype=BF16, rngs=rngs)


def by_example(x: jax.Array) -> jax.Array:
    return with_logical_constraint(x, ("batch", *[None] * (x.ndim - 1)))


def by_expert(x: jax.Array) -> jax.Array:
    return with_logical_constraint(x, (None, "experts", None, None))


class Feed(nnx.Module):
    def __init__(self, wide: int, rngs: nnx.Rngs) -> None:
        self.gate, self.up, self.down = (dense(*shape, rngs) for shape in ((HIDDEN, wide),) * 2 + ((wide, HIDDEN),))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Each token goes to four experts, and every expert takes as many tokens of an example."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("experts", None, None))
        self.router, self.shared = dense(HIDDEN, EXPERTS, rngs), Feed(SHARED, rngs)
        self.widen = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, 2 * WIDE), BF16))
        self.narrow = nnx.Param(init(rngs.params(), (EXPERTS, WIDE, HIDDEN), BF16))

    def __call__(self, x: jax.Array) -> jax.Array:
        examples, length, _ = x.shape
        scores, chosen = jax.lax.top_k(jax.nn.sigmoid(self.router(x).astype(jnp.float32)), CHOSEN)
        order = jnp.argsort(chosen.reshape(examples, -1), axis=1)
        sent = jnp.take_along_axis(x, (order // CHOSEN)[..., None], axis=1)
        sent = by_expert(by_example(sent.reshape(examples, EXPERTS, -1, HIDDEN)))
        gate, up = jnp.split(jnp.einsum("becd,edf->becf", sent, self.widen[...]), 2, axis=-1)
        made = by_example(by_expert(jnp.einsum("becf,efd->becd", nnx.silu(gate) * up, self.narrow[...])))
        back = jnp.take_along_axis(made.reshape(examples, -1, HIDDEN), jnp.argsort(order, axis=1)[..., None], axis=1)
        out = jnp.einsum("bskd,bsk->bsd", back.reshape(examples, length, CHOSEN, HIDDEN), scores.astype(BF16))
        return out + self.shared(x)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        size = HIDDEN // HEADS
        self.norm1, self.norm2 = (nnx.RMSNorm(HIDDEN, dtype=BF16, param_dtype=BF16, rngs=rngs) for _ in range(2))
        self.q, self.out = dense(HIDDEN, HIDDEN, rngs), dense(HIDDEN, HIDDEN, rngs)
        self.k, self.v = (dense(HIDDEN, GROUPS * size, rngs) for _ in range(2))
        self.experts = Experts(rngs)

    def attend(self, x: jax.Array) -> jax.Array:
        """Let each window of tokens look at itself and the one before it."""
        windows, size = (*x.shape[:-2], x.shape[1] // WINDOW, WINDOW), HIDDEN // HEADS
        q = self.q(x).reshape(*windows, GROUPS, HEADS // GROUPS, size)
        k, v = (f(x).reshape(*windows, GROUPS, size) for f in (self.k, self.v))
        k, v = (jnp.concatenate([jnp.roll(of, 1, axis=1), of], axis=2) for of in (k, v))
        scores = jnp.einsum("bwqghd,bwkgd->bwghqk", q, k) / size**0.5
        mask = jnp.tril(jnp.ones((WINDOW, 2 * WINDOW), bool), WINDOW)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e4))
        return self.out(jnp.einsum("bwghqk,bwkgd->bwqghd", weights, v).reshape(x.shape))

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(self.norm1(x))
        return by_example(x + self.experts(self.norm2(x)))


class Snowball(nnx.Module):
    def __init__(self, layers: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, HIDDEN, dtype=BF16, param_dtype=BF16, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(rngs), name=f"block_{i}") for i in range(layers)])
        self.norm = nnx.RMSNorm(HIDDEN, dtype=BF16, param_dtype=BF16, rngs=rngs)
        self.head = dense(HIDDEN, VOCABULARY, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = by_example(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def loss(model: Snowball, batch: dict[str, jax.Array]) -> jax.Array:
    """Take the logits of some tokens at a time, as a kernel does."""
    x = model(batch["tokens"])
    cut = lambda of: jnp.moveaxis(of.reshape(len(of), -1, CHUNK, *of.shape[2:]), 1, 0)  # noqa: E731
    kernel = model.head.kernel[...]

    @jax.checkpoint
    def of_chunk(sums: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        logits = jnp.einsum("bsd,dv->bsv", chunk[0], kernel).astype(jnp.float32)
        return sums + optax.softmax_cross_entropy_with_integer_labels(logits, chunk[1]).sum(), None

    total, _ = jax.lax.scan(of_chunk, jnp.zeros(()), (cut(x), cut(batch["targets"])))
    return total / batch["targets"].size


def make(layers: int = LAYERS, **options: Any) -> tuple[PipelineTrainer, Any]:
    ids = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    with linen.logical_axis_rules(RULES):
        trainer = PipelineTrainer(
            lambda rngs: Snowball(layers, rngs=rngs), optax.adamw(1e-4), loss, logging=False, **options
        )
    return trainer, {"tokens": ids, "targets": ids}


def main() -> None:
    quoter = Quoter(trace_model(make, "layers"), device_named("h100-sxm"), Curves())
    found = quoter.quoted(Layout(pipeline=8, expert=8, microbatch=8, schedule="dualpipe_v", stages=16))
    print(f"{found.layout}: {found.seconds:.3f} s, measured {MEASURED_SECONDS} "
          f"({found.seconds / MEASURED_SECONDS - 1:+.1%}); {found.memory / 1e9:.1f} GB, "
          f"measured {MEASURED_BYTES / 1e9:.1f} ({found.memory / MEASURED_BYTES - 1:+.1%})")  # fmt: skip
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.parts.items()))
    print(", ".join(f"{kind} {nbytes / 1e9:.1f} GB" for kind, nbytes in found.nbytes.items()))


if __name__ == "__main__":
    main()
