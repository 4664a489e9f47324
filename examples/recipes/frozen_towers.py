"""Trains a projector between two frozen towers, for pictures and text; then all three.

    python examples/recipes/frozen_towers.py projector --output run
    python examples/recipes/frozen_towers.py all --output run --start run/projector/100

A vision tower looks at a picture; a projector turns what it saw into tokens in front of
the text, which a language model continues (the two phases of LLaVA: Liu et al., 2023).
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import Checkpoints, PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Logging, Training

PATCHES, WORDS, VISION, LANGUAGE, VISION_BLOCKS, LANGUAGE_BLOCKS = 8, 32, 96, 32, 6, 4
FROZEN = {"projector": ["vision", "language"], "all": None}


class Block(nnx.Module):
    def __init__(self, width: int, causal: bool, *, rngs: nnx.Rngs):
        self.causal = causal
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.attend = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.attend(self.norm1(x)).reshape(*x.shape[:2], 3, 4, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.mix(seen.reshape(x.shape))
        return x + self.narrow(jax.nn.gelu(self.widen(self.norm2(x))))


class Tower(nnx.Module):
    def __init__(self, name: str, width: int, blocks: int, rngs: nnx.Rngs):
        self.place = nnx.Embed(2 * PATCHES, width, rngs=rngs)
        made = [Block(width, name == "language", rngs=rngs) for _ in range(blocks)]
        named = [PipelineStage(x, name=f"{name}_{i}") for i, x in enumerate(made)]
        self.blocks = nnx.List(named)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.place(jnp.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Vision(Tower):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__("vision", VISION, VISION_BLOCKS, rngs)
        self.patch = nnx.Linear(16, VISION, rngs=rngs)


class Language(Tower):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__("language", LANGUAGE, LANGUAGE_BLOCKS, rngs)
        self.embed = nnx.Embed(WORDS, LANGUAGE, rngs=rngs)
        self.head = nnx.Linear(LANGUAGE, WORDS, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.vision = Vision(rngs=rngs)
        self.projector = nnx.Linear(VISION, LANGUAGE, rngs=rngs)
        self.language = Language(rngs=rngs)

    def __call__(self, picture: jax.Array, text: jax.Array) -> jax.Array:
        seen = self.projector(self.vision(self.vision.patch(picture)))
        x = jnp.concatenate([seen, self.language.embed(text)], axis=1)
        return self.language.head(self.language(x)[:, PATCHES - 1 : -1])


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["picture"], batch["text"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"]).mean()


def make_batch(rng: np.random.Generator, size: int = 32) -> dict[str, np.ndarray]:
    """Texts of random words, and pictures: a pattern for each word, with noise."""
    patterns = np.random.default_rng(0).normal(size=(WORDS, 16))
    text = rng.integers(0, WORDS, (size, PATCHES)).astype(np.int32)
    noise = 0.3 * rng.normal(size=(size, PATCHES, 16))
    return {"picture": (patterns[text] + noise).astype(np.float32), "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a projector, then all.")
    parser.add_argument("trained", choices=list(FROZEN))
    parser.add_argument("--output", required=True, help="a directory for both runs")
    parser.add_argument(
        "--start", help="a checkpoint whose weights this run begins with"
    )
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # takes effect on CPU alone
    trainer = PipelineTrainer(
        lambda rngs: Model(rngs=rngs), optax.adam(2e-3), loss_fn, num_stages=4,
        num_microbatches=8, mesh={}, logging=Logging(every=50),
        training=Training(frozen=FROZEN[args.trained]),
        checkpoints=Checkpoints(f"{args.output}/{args.trained}", every=100),
    )  # fmt: skip
    if args.start is not None:
        trainer.restore(args.start, only=["params/*", "model_state/*"])
    rng = np.random.default_rng(1)
    trainer.fit((make_batch(rng) for _ in range(args.steps)), steps=args.steps)


if __name__ == "__main__":
    main()
