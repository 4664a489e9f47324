"""Trains two towers by a contrastive loss over the whole batch: each picture is to find its own caption among all.

    python examples/two_towers.py

A contrastive loss compares all examples of a batch, and a microbatch holds a few. `WholeBatchLoss` takes it in two
parts: `embed` runs in the pipeline, `compare` sees the embeddings of the whole batch.

At real size: a step runs the towers forward twice, so it takes about 4/3 of the time of a step with a mean loss; the
rank of the comparison holds the embeddings: 32,768 pairs of width 1024 in float32 are 256 MiB.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer, WholeBatchLoss
from jaxpp_flax.trainers import Logging

WIDTH, CAPTION, WORDS = 64, 8, 32


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(jax.nn.gelu(self.widen(self.norm(x))))


def make_blocks(name: str, rngs: nnx.Rngs) -> nnx.List:
    return nnx.List([PipelineStage(Block(rngs=rngs), name=f"{name}_{i}") for i in range(3)])


class Towers(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.look = nnx.Linear(CAPTION * 16, WIDTH, rngs=rngs)
        self.pictures = make_blocks("picture", rngs)
        self.read = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.place = nnx.Embed(CAPTION, WIDTH, rngs=rngs)
        self.captions = make_blocks("caption", rngs)
        self.log_temperature = nnx.Param(jnp.log(jnp.asarray(0.1)))

    def __call__(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        picture = self.look(batch["picture"])
        for block in self.pictures:
            picture = block(picture)
        caption = (self.read(batch["caption"]) * self.place(jnp.arange(CAPTION))).sum(1)
        for block in self.captions:
            caption = block(caption)
        return picture, caption


def normalize(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def embed(model: Towers, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    picture, caption = model(batch)
    # A parameter that the comparison needs is returned with the embeddings.
    return {"picture": normalize(picture), "caption": normalize(caption), "log_temperature": model.log_temperature[...]}


def compare(found: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of CLIP: a picture's own caption among all captions, and the other way round."""
    logits = found["picture"] @ found["caption"].T / jnp.exp(found["log_temperature"])  # (batch, batch)
    own = jnp.arange(len(logits))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = (cross_entropy(logits, own).mean() + cross_entropy(logits.T, own).mean()) / 2
    return loss, {"found": (logits.argmax(-1) == own).mean()}


def make_batch(rng: np.random.Generator, size: int = 64) -> dict[str, np.ndarray]:
    """Captions of random words, and pictures that show each word as a fixed pattern, with noise."""
    patterns = np.random.default_rng(0).normal(size=(WORDS, 16))
    caption = rng.integers(0, WORDS, (size, CAPTION)).astype(np.int32)
    picture = patterns[caption].reshape(size, -1) + rng.normal(size=(size, CAPTION * 16))
    return {"picture": picture.astype(np.float32), "caption": caption}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 4)  # takes effect on CPU alone
    trainer = PipelineTrainer(
        lambda rngs: Towers(rngs=rngs), optax.adam(2e-3), WholeBatchLoss(embed, compare), num_stages=3,
        num_microbatches=8, mesh={}, logging=Logging(every=50),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    trainer.fit((make_batch(rng) for _ in range(steps)), steps=steps)
    found = trainer.evaluate([make_batch(rng)])["found"]
    print(f"of 64 held-out pictures, {found:.0%} find their caption; a guess finds 2%")


if __name__ == "__main__":
    main()
