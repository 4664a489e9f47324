"""Trains a mixture of experts: each block sends a token to one of four experts, which two devices of a stage share.

    python examples/mixture_of_experts.py

Two stages of two devices: the axis "expert" divides the experts' weights, and XLA moves the tokens. A block returns its
balancing loss beside its activations: all that the loss needs from a stage crosses the marks.

At real size: 8 experts of 7 billion parameters in all hold 16 bytes a parameter under AdamW, 112 GB; 4 stages with an
expert axis of 2 hold 14 GB on each of 8 devices.
"""

from __future__ import annotations

import argparse
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Logging, MicrobatchLossWarning

WIDTH, HIDDEN, EXPERTS, BLOCKS = 32, 64, 4, 4
SPARE = 2.0  # an expert takes at most so many times its even share of the tokens


class Experts(nnx.Module):
    """Each token goes to the expert that its router scores highest; an expert that is full lets it pass unchanged."""

    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(batch_axis=0), ("expert", None, None))
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.widen = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.narrow = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = x.reshape(-1, WIDTH)
        scores = jax.nn.softmax(self.router(tokens))
        chosen = jax.nn.one_hot(scores.argmax(-1), EXPERTS)  # (tokens, experts)
        capacity = int(SPARE * len(tokens) / EXPERTS)
        place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1).astype(jnp.int32) - 1
        slots = chosen[:, :, None] * jax.nn.one_hot(place, capacity)[:, None, :]  # (tokens, experts, capacity)
        sent = jnp.einsum("tec,td->ecd", slots, tokens)
        made = jnp.einsum(
            "ech,ehd->ecd", jax.nn.gelu(jnp.einsum("ecd,edh->ech", sent, self.widen[...])), self.narrow[...]
        )
        out = jnp.einsum("tec,ecd->td", slots, made) * scores.max(-1, keepdims=True)
        balance = EXPERTS * (chosen.mean(0) * scores.mean(0)).sum()  # 1 for an even share
        return x + out.reshape(x.shape), balance


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mix = nnx.Conv(WIDTH, WIDTH, kernel_size=(3,), padding="CAUSAL", rngs=rngs)
        self.experts = Experts(rngs=rngs)

    def __call__(self, x: jax.Array, balance: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, more = self.experts(x + jax.nn.gelu(self.mix(self.norm(x))))
        return x, balance + more


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(rngs=rngs), name=f"block_{i}") for i in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, balance = self.embed(tokens), jnp.zeros(())
        for block in self.blocks:
            x, balance = block(x, balance)
        return self.head(x), balance / BLOCKS


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits, balance = model(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return loss + 0.01 * balance, {"balance": balance}


def make_batch(rng: np.random.Generator, size: int = 16, length: int = 32) -> dict[str, np.ndarray]:
    """Rows that count up by a step of their own: to foretell a token takes the two before it."""
    start, step = rng.integers(0, 256, (size, 1)), rng.integers(1, 9, (size, 1))
    text = ((start + step * np.arange(length + 1)) % 256).astype(np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 4)  # takes effect on CPU alone
    # The experts' capacity and balance are those of a microbatch, which is meant here.
    warnings.simplefilter("ignore", MicrobatchLossWarning)
    rng = np.random.default_rng(0)
    trainer = PipelineTrainer(
        lambda rngs: Model(rngs=rngs), optax.adam(3e-3), loss_fn, num_stages=2, num_microbatches=4,
        mesh={"expert": 2}, logging=Logging(every=50),
    )  # fmt: skip
    metrics = trainer.fit((make_batch(rng) for _ in range(steps)), steps=steps)
    print(f"loss {metrics['loss']:.3f}, balance {metrics['balance']:.2f} (1 is even)")


if __name__ == "__main__":
    main()
