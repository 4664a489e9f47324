"""Trains a GPT on packed documents, with ring attention over the devices of each stage.

    python examples/recipes/ring_attention.py

Each of two stages has two devices, and each device half of every row. The attention is
that of `ring.py`, beside this file; all else in a block works on each token alone.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Logging
from ring import AXIS, attention, zigzag

WIDTH, HEADS, LENGTH, BLOCKS, STAGES, PARTS = 32, 4, 64, 4, 2, 2


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, places: tuple[jax.Array, jax.Array]) -> jax.Array:
        heads = self.attend(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        x = x + self.mix(attention(q, k, v, places).reshape(x.shape))
        return x + self.narrow(jax.nn.gelu(self.widen(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        blocks = [PipelineStage(Block(rngs=rngs)) for _ in range(BLOCKS)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        x = self.embed(batch["tokens"]) + self.position(batch["positions"])
        for block in self.blocks:
            x = block(x, (batch["documents"], batch["positions"]))
        return self.head(self.norm(x))


def loss_fn(model: GPT, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The sum over tokens, and their number: a document's last token has no target."""
    logits, targets = model(batch), batch["targets"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * batch["counts"]).sum(), batch["counts"].sum()


def make_batch(rng: np.random.Generator, size: int = 16) -> dict[str, np.ndarray]:
    """Rows full of documents; each counts up from its own start, by its own step."""
    documents = np.cumsum(rng.random((size, LENGTH)) < 0.05, axis=1)
    first = np.array([np.searchsorted(row, row) for row in documents])
    positions = np.arange(LENGTH) - first
    step = np.take_along_axis(rng.integers(1, 9, (size, LENGTH)), documents, 1)
    start = np.take_along_axis(rng.integers(0, 256, (size, LENGTH)), documents, 1)
    tokens = (start + step * positions) % 256
    batch = {
        "tokens": tokens,
        "targets": (tokens + step) % 256,
        "documents": documents,
        "positions": positions,
        "counts": np.diff(documents, axis=1, append=-1) == 0,
    }
    order = zigzag(LENGTH, PARTS)
    return {name: leaf[:, order].astype(np.int32) for name, leaf in batch.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with ring attention.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    jax.config.update(
        "jax_num_cpu_devices", STAGES * PARTS
    )  # takes effect on CPU alone
    trainer = PipelineTrainer(
        lambda rngs: GPT(rngs=rngs), optax.adam(3e-3), loss_fn, num_stages=STAGES,
        num_microbatches=4, mesh={AXIS: PARTS}, logging=Logging(every=50),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    trainer.fit((make_batch(rng) for _ in range(steps)), steps=steps)
    loss = trainer.evaluate([make_batch(rng) for _ in range(4)])["loss"]
    print(f"held-out loss: {loss:.3f} nats a token; a guess has 5.5")


if __name__ == "__main__":
    main()
