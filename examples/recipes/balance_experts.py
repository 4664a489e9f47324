"""Trains a mixture of experts that drops no token and needs no loss of balance.

    python examples/recipes/balance_experts.py
    python examples/recipes/balance_experts.py --rate 0     # without balance

Tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each group by the
weights of its expert: none is ever full. Once a step, a bias that only chooses experts
goes down for busy ones, and up for idle ones (Wang et al., 2024; DeepSeek-V3, 2024).
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Logging, Training

WIDTH, HIDDEN, EXPERTS, CHOSEN, BLOCKS = 32, 64, 8, 2, 4


class Experts(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.widen = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.narrow = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))
        self.bias = nnx.Variable(jnp.zeros(EXPERTS))  # no `nnx.Param`: not trained
        self.load = nnx.Variable(jnp.zeros(EXPERTS))  # tokens of the step so far
        self.last_load = nnx.Variable(jnp.zeros(EXPERTS))

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, WIDTH)
        scores = jax.nn.sigmoid(self.router(tokens))  # (tokens, experts)
        _, experts = jax.lax.top_k(scores + self.bias[...], CHOSEN)  # bias: only here
        gates = jnp.take_along_axis(scores, experts, axis=-1)
        gates = gates / gates.sum(-1, keepdims=True)
        order = jnp.argsort(experts.ravel())  # of the pairs of token and expert
        sizes = jnp.bincount(experts.ravel(), length=EXPERTS)
        self.load[...] += sizes
        sent = tokens[order // CHOSEN]  # (tokens * chosen, width)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(sent, self.widen[...], sizes))
        results = jax.lax.ragged_dot(hidden, self.narrow[...], sizes)
        results = results * gates.ravel()[order, None]
        return tokens.at[order // CHOSEN].add(results).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mix = nnx.Conv(WIDTH, WIDTH, (3,), padding="CAUSAL", rngs=rngs)
        self.experts = Experts(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.experts(x + jax.nn.gelu(self.mix(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        blocks = [PipelineStage(Block(rngs=rngs)) for _ in range(BLOCKS)]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    logits, targets = model(batch["tokens"]), batch["targets"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def move_biases(rate: float):
    def after_update(model: Model, metrics: dict[str, jax.Array]) -> None:
        for block in model.blocks:
            experts, load = block.experts, block.experts.load[...]
            experts.bias[...] += rate * jnp.sign(load.mean() - load)
            experts.last_load[...], experts.load[...] = load, jnp.zeros(EXPERTS)

    return after_update


def make_batch(rng: np.random.Generator, size: int = 16, length: int = 32):
    """Rows that count up by a step of their own, which two tokens tell."""
    start, step = rng.integers(0, 256, (size, 1)), rng.integers(1, 9, (size, 1))
    text = ((start + step * np.arange(length + 1)) % 256).astype(np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains balanced experts.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.01, help="a bias's step")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # takes effect on CPU alone
    trainer = PipelineTrainer(
        lambda rngs: Model(rngs=rngs), optax.adam(3e-3), loss_fn,
        num_stages=4, num_microbatches=4, mesh={}, logging=Logging(every=50),
        training=Training(after_update=move_biases(args.rate)),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for steps in (1, args.steps - 1):
        trainer.fit((make_batch(rng) for _ in range(steps)), steps=steps)
        print(f"step {trainer.step}: share of tokens in % (even: {100 / EXPERTS})")
        for i, block in enumerate(trainer.gather_model().blocks):
            load = block.experts.last_load[...]
            print(f"  block {i} ", *(f"{x:5.1f}" for x in 100 * load / load.sum()))


if __name__ == "__main__":
    main()
