"""How far a quote is from published steps of Llama 3.1 405B on 512 H100; the curves are not fitted to them.

    python benchmarks/quote_llama.py

Measured: torchtitan's `docs/performance.md`, table 5 (versions of December 2024): pipeline 8 x FSDP 8 x tensor 8, 256
examples of 8,192 tokens, every layer recomputed, products of linear layers in float8, H100 with HBM2e at 2.4 TB/s. Its
page names no microbatch; that version's default is as many microbatches as ranks, of 4 examples here. It gathers
parameters once a step, for which a quote has no layout: the seconds are those of `data` in the place of `fsdp`, whose
sums move as many bytes; the bytes are those of `fsdp`, with all gathered parameters. Of what a backward recomputes,
16 GiB are scores of attention here, which a kernel does not hold. There, collectives of
tensor-parallel devices run beside products; in a quote nothing does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.linen.spmd import with_logical_constraint
from quote_errors import loss

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import Curves, Quoter, device_named
from jaxpp_flax.planning.quoting.layouts import Layout
from jaxpp_flax.planning.quoting.traced import trace_model

BF16, FORWARD, BACKWARD = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
HIDDEN, HEADS, GROUPS, WIDE, LAYERS, VOCABULARY, SEQUENCE, BATCH = 16384, 128, 8, 53248, 126, 128256, 8192, 256
RULES = (("batch", ("data", "fsdp")), ("sequence", "tensor"))
MEASURED = (("1f1b", 8, 100, 82.5), ("interleaved_1f1b", 16, 128, 72.7))  # stages, tokens a second and device, GiB


@jax.custom_vjp
def in_float8(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x.astype(FORWARD), w.astype(FORWARD), preferred_element_type=BF16)


def _backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    g8 = g.astype(BACKWARD)
    back = jnp.einsum("bso,io->bsi", g8, w.astype(FORWARD), preferred_element_type=BF16)
    return back, jnp.einsum("bsi,bso->io", x.astype(FORWARD), g8, preferred_element_type=BF16)


in_float8.defvjp(lambda x, w: (in_float8(x, w), (x, w)), _backward)


def dense(inputs: int, outputs: int, cut: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), cut)
    product = lambda x, w, *_, **__: in_float8(x, w)  # noqa: E731
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=BF16, kernel_init=init, dot_general=product, rngs=rngs)


def whole(x: jax.Array) -> jax.Array:
    return with_logical_constraint(x, ("batch", None, None))


def cut(x: jax.Array) -> jax.Array:
    """Let tensor-parallel devices share the tokens, as sequence parallelism does between products."""
    return with_logical_constraint(x, ("batch", "sequence", None))


class Block(nnx.Module):
    """A layer of Llama, annotated as Megatron cuts it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        size, up, down = HIDDEN // HEADS, ("fsdp", "tensor"), ("tensor", "fsdp")
        self.norm1, self.norm2 = (nnx.RMSNorm(HIDDEN, dtype=BF16, rngs=rngs) for _ in range(2))
        self.q, self.out = dense(HIDDEN, HIDDEN, up, rngs), dense(HIDDEN, HIDDEN, down, rngs)
        self.k, self.v = (dense(HIDDEN, GROUPS * size, up, rngs) for _ in range(2))
        self.gate, self.up = (dense(HIDDEN, WIDE, up, rngs) for _ in range(2))
        self.down = dense(WIDE, HIDDEN, down, rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        each, size = (*x.shape[:2], GROUPS), HIDDEN // HEADS
        y = whole(self.norm1(x))
        q = self.q(y).reshape(*each, HEADS // GROUPS, size)
        k, v = (f(y).reshape(*each, size) for f in (self.k, self.v))
        scores = jnp.einsum("bqghd,bkgd->bghqk", q, k) / size**0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4))
        x = x + cut(self.out(jnp.einsum("bghqk,bkgd->bqghd", weights, v).reshape(x.shape)))
        y = whole(self.norm2(x))
        return x + cut(self.down(nnx.silu(self.gate(y)) * self.up(y)))


class Llama(nnx.Module):
    def __init__(self, layers: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        table, head = (nnx.with_partitioning(init, axes) for axes in (("tensor", "fsdp"), ("fsdp", "tensor")))
        self.embed = nnx.Embed(VOCABULARY, HIDDEN, dtype=BF16, embedding_init=table, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(rngs), name=f"block_{i}") for i in range(layers)])
        self.norm = nnx.RMSNorm(HIDDEN, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, VOCABULARY, use_bias=False, dtype=BF16, kernel_init=head, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = cut(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(whole(self.norm(x)))


def make(layers: int = LAYERS, **options: Any) -> tuple[PipelineTrainer, Any]:
    ids = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    with linen.logical_axis_rules(RULES):
        trainer = PipelineTrainer(
            lambda rngs: Llama(layers, rngs=rngs), optax.adamw(1e-4), loss, precision="bfloat16", logging=False,
            **options,
        )  # fmt: skip
    return trainer, {"tokens": ids, "targets": ids}


def main() -> None:
    device = device_named("h100-sxm")
    peak = {**device.peak, "float8_e4m3fn": 1979e12, "float8_e5m2": 1979e12}
    device = replace(device, name="h100-hbm2e", peak=peak, memory=96e9, memory_bandwidth=2400e9)
    quoter = Quoter(trace_model(make, "layers"), device, Curves())
    for schedule, stages, tokens, gibibytes in MEASURED:
        layout = Layout(pipeline=8, fsdp=8, tensor=8, microbatch=4, schedule=schedule, stages=stages)
        once, held = quoter.quoted(replace(layout, fsdp=1, data=8)), quoter.quoted(layout).memory
        gathered = max(sum(load.gathered.values()) for load in quoter.step_model(layout).stages) * stages / 8
        found, held = once.tokens / once.seconds / layout.devices, (held + gathered) / 2**30
        print(f"{layout}: {found:.0f} tokens/s and device, measured {tokens} ({found / tokens - 1:+.1%}); "
              f"{held:.1f} GiB, measured {gibibytes} ({held / gibibytes - 1:+.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
