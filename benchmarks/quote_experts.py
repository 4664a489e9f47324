"""How far a quote is from published steps of two mixtures of experts on H100; the curves are not fitted to them.

    python benchmarks/quote_experts.py

Measured in September 2026 by marin, in bfloat16, with every layer recomputed, and an axis of 8 experts in each node
that cuts the examples too:

- Snowball, 67B parameters of which 2B compute a token (`experiments/grug/moe_pipeline`): 64 devices, DualPipeV of 16
  stages on 8 ranks, 256 examples of 8,192 tokens in 32 microbatches, AdamW.
- Hero, 535B of which 23B compute a token (`experiments/grug/moe_hero_ep`, issue 9277): 192 devices, 1F1B on 24 ranks,
  384 examples of 65,536 tokens in 48 microbatches, inputs of layers and the optimizer's state on the host. Its
  optimizer is Muon; here Adam with the state on the devices.

Here experts get even shares by an all-to-all; Snowball gathers all tokens of a node instead. Attention and the loss are
loops over parts, of which a quote counts the products, as of a kernel. A local layer looks back at 1,024 to 2,047
tokens, a global one (every fourth of Hero) at half of all. Gates, convolutions and rotations of the two are left out.
The quote balances the stages; there two layers are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from jaxpp_flax.schedules import StageResiduals

BF16, VOCABULARY, SIZE, WINDOW = jnp.bfloat16, 128256, 128, 1024
RULES = (("batch", ("data", "fsdp", "expert")), ("experts", "expert"))


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: `groups` of keys in local layers; `latent`: the width in which experts work."""

    hidden: int
    heads: int
    groups: int
    layers: int
    experts: int
    chosen: int
    wide: int
    latent: int
    shared: int
    global_every: int
    sequence: int
    batch: int

    @property
    def equal(self) -> bool:
        """Whether all layers are."""
        return self.global_every > self.layers


SNOWBALL = Shape(2560, 20, 5, 26, 256, 4, 1280, 2560, 2560, 1000, 8192, 256)
HERO = Shape(6144, 48, 12, 48, 384, 8, 3072, 3072, 6144, 4, 65536, 384)


def dense(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=BF16, param_dtype=BF16, rngs=rngs)


def by_example(x: jax.Array) -> jax.Array:
    return with_logical_constraint(x, ("batch", *[None] * (x.ndim - 1)))


def by_expert(x: jax.Array) -> jax.Array:
    return with_logical_constraint(x, (None, "experts", None, None))


class Experts(nnx.Module):
    """Each token goes to some experts, and every expert takes as many tokens of an example."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("experts", None, None))
        hidden, latent, self.shape = shape.hidden, shape.latent, shape
        self.router = dense(hidden, shape.experts, rngs)
        self.into, self.back = (
            (dense(hidden, latent, rngs), dense(latent, hidden, rngs)) if latent < hidden else (None, None)
        )
        self.gate, self.up, self.down = (
            dense(*of, rngs) for of in ((hidden, shape.shared), (hidden, shape.shared), (shape.shared, hidden))
        )
        self.widen = nnx.Param(init(rngs.params(), (shape.experts, latent, 2 * shape.wide), BF16))
        self.narrow = nnx.Param(init(rngs.params(), (shape.experts, shape.wide, latent), BF16))

    def __call__(self, x: jax.Array) -> jax.Array:
        (examples, length, _), chosen = x.shape, self.shape.chosen
        scores, places = jax.lax.top_k(jax.nn.sigmoid(self.router(x).astype(jnp.float32)), chosen)
        order = jnp.argsort(places.reshape(examples, -1), axis=1)
        sent = x if self.into is None else self.into(x)
        taken = length * chosen // self.shape.experts * self.shape.experts  # the few others are dropped
        sent = jnp.take_along_axis(sent, (order[:, :taken] // chosen)[..., None], axis=1)
        sent = by_expert(by_example(sent.reshape(examples, self.shape.experts, -1, self.shape.latent)))
        gate, up = jnp.split(jnp.einsum("becd,edf->becf", sent, self.widen[...]), 2, axis=-1)
        made = by_example(by_expert(jnp.einsum("becf,efd->becd", nnx.silu(gate) * up, self.narrow[...])))
        rest = [(0, 0), (0, length * chosen - taken), (0, 0)]
        made = jnp.pad(made.reshape(examples, -1, self.shape.latent), rest)
        made = jnp.take_along_axis(made, jnp.argsort(order, axis=1)[..., None], axis=1)
        out = jnp.einsum("bskd,bsk->bsd", made.reshape(examples, length, chosen, -1), scores.astype(BF16))
        out = out if self.back is None else self.back(out)
        return out + self.down(nnx.silu(self.gate(x)) * self.up(x))


@jax.checkpoint
def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of a window of tokens, with a mask that no product depends on."""
    scores = jnp.einsum("bqghd,bkgd->bghqk", q, k) / SIZE**0.5
    return jnp.einsum("bghqk,bkgd->bqghd", jax.nn.softmax(scores), v)


class Block(nnx.Module):
    def __init__(self, shape: Shape, is_global: bool, rngs: nnx.Rngs) -> None:
        hidden, self.is_global = shape.hidden, is_global
        self.groups = shape.groups // 2 if is_global else shape.groups
        self.norm1, self.norm2 = (nnx.RMSNorm(hidden, dtype=BF16, param_dtype=BF16, rngs=rngs) for _ in range(2))
        self.q, self.out = dense(hidden, hidden, rngs), dense(hidden, hidden, rngs)
        self.k, self.v = (dense(hidden, self.groups * SIZE, rngs) for _ in range(2))
        self.experts = Experts(shape, rngs)

    def attention(self, x: jax.Array) -> jax.Array:
        examples, length, _ = x.shape
        windows = lambda of: jnp.moveaxis(  # noqa: E731
            of.reshape(examples, length // WINDOW, WINDOW, self.groups, -1, SIZE), 1, 0
        )
        q, k, v = windows(self.q(x)), *(windows(f(x))[..., 0, :] for f in (self.k, self.v))
        if self.is_global:
            k, v = (jnp.moveaxis(of[: len(of) // 2], 0, 1).reshape(examples, -1, self.groups, SIZE) for of in (k, v))
            found = jax.lax.map(lambda part: attend(part, k, v), q)
        else:
            k, v = (jnp.concatenate([jnp.roll(of, 1, axis=0), of], axis=2) for of in (k, v))
            found = jax.lax.map(lambda part: attend(*part), (q, k, v))
        return self.out(jnp.moveaxis(found, 0, 1).reshape(x.shape))

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return by_example(x + self.experts(self.norm2(x)))


class Model(nnx.Module):
    def __init__(self, shape: Shape, layers: int, *, rngs: nnx.Rngs) -> None:
        is_global = [i % shape.global_every == shape.global_every - 1 for i in range(layers)]
        self.embed = nnx.Embed(VOCABULARY, shape.hidden, dtype=BF16, param_dtype=BF16, rngs=rngs)
        blocks = (Block(shape, of, rngs) for of in is_global)
        self.blocks = nnx.List([PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)])
        self.norm = nnx.RMSNorm(shape.hidden, dtype=BF16, param_dtype=BF16, rngs=rngs)
        self.head = dense(shape.hidden, VOCABULARY, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = by_example(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """Take the logits of some tokens at a time, as a kernel does."""
    x = model(batch["tokens"])
    cut = lambda of: jnp.moveaxis(of.reshape(len(of), -1, WINDOW, *of.shape[2:]), 1, 0)  # noqa: E731
    kernel = model.head.kernel[...]

    @jax.checkpoint
    def of_part(sums: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        logits = jnp.einsum("bsd,dv->bsv", part[0], kernel).astype(jnp.float32)
        return sums + optax.softmax_cross_entropy_with_integer_labels(logits, part[1]).sum(), None

    total, _ = jax.lax.scan(of_part, jnp.zeros(()), (cut(x), cut(batch["targets"])))
    return total / batch["targets"].size


def factory(shape: Shape) -> Callable[..., tuple[PipelineTrainer, Any]]:
    def make(layers: int = shape.layers, **options: Any) -> tuple[PipelineTrainer, Any]:
        ids = jax.ShapeDtypeStruct((shape.batch, shape.sequence), jnp.int32)
        with linen.logical_axis_rules(RULES):
            model = lambda rngs: Model(shape, layers, rngs=rngs)  # noqa: E731
            trainer = PipelineTrainer(model, optax.adamw(1e-4), loss, logging=False, **options)
        return trainer, {"tokens": ids, "targets": ids}

    return make


ROWS = (
    ("Snowball", SNOWBALL, Layout(pipeline=8, expert=8, microbatch=8, schedule="dualpipe_v", stages=16), 3.476, 59.15),
    (
        "Hero", HERO,
        Layout(pipeline=24, expert=8, microbatch=8, stages=24, residuals=StageResiduals(offload=1.0)), 174.4, None,
    ),
)  # fmt: skip


def main() -> None:
    for name, shape, layout, seconds, gigabytes in ROWS:
        traced = trace_model(factory(shape), "layers" if shape.equal else None)
        found = Quoter(traced, device_named("h100-sxm"), Curves()).quoted(layout)
        held = found.memory / 1e9
        known = "" if gigabytes is None else f", measured {gigabytes} ({held / gigabytes - 1:+.1%})"
        print(f"{name}, {layout}: {found.seconds:.2f} s, measured {seconds} ({found.seconds / seconds - 1:+.1%}), "
              f"MFU {found.mfu:.1%}; {held:.1f} GB{known}")  # fmt: skip
        print("  " + ", ".join(f"{part} {time:.2f} s" for part, time in found.parts.items()))
        print("  " + ", ".join(f"{kind} {nbytes / 1e9:.1f} GB" for kind, nbytes in found.nbytes.items()), flush=True)


if __name__ == "__main__":
    main()
