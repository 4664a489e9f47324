"""A generator against a discriminator (GAN, arXiv 1406.2661), both in one step.

    python examples/recipes/gan.py

One loss is the sum of two. The discriminator's does not reach the generator, and the
generator's goes through a discriminator whose weights are constants.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Logging, Training

NOISE, POINT = 16, 2  # the widths of what the generator reads and makes
ANGLES = 2 * np.pi * np.arange(8) / 8
PLACES = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=-1)
Batch = dict[str, Any]


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(jax.nn.gelu(self.wide(self.norm(x))))


class Network(nnx.Module):
    """Residual blocks between two linear layers, each block a possible stage."""

    def __init__(
        self, name: str, sizes: tuple[int, int, int], blocks: int, *, rngs: nnx.Rngs
    ):
        inputs, width, outputs = sizes
        self.first = nnx.Linear(inputs, width, rngs=rngs)
        each = [Block(width, rngs=rngs) for _ in range(blocks)]
        self.blocks = nnx.List(
            [PipelineStage(block, name=f"{name}_{i}") for i, block in enumerate(each)]
        )
        self.last = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Gan(nnx.Module):
    def __init__(self, width: int, blocks: int, *, rngs: nnx.Rngs):
        to_point, to_score = (NOISE, width, POINT), (POINT, width, 1)
        self.generator = Network("generator", to_point, blocks, rngs=rngs)
        self.discriminator = Network("discriminator", to_score, blocks, rngs=rngs)


def constant(module: Network) -> Network:
    """The same network; gradients go through it, and none into its weights."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.lax.stop_gradient(state))


def loss_fn(gan: Gan, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    fake = gan.generator(batch["noise"])
    both = jnp.concatenate([batch["real"], jax.lax.stop_gradient(fake)])
    real_score, fake_score = jnp.split(gan.discriminator(both), 2)
    judged = constant(gan.discriminator)(fake)
    losses = {
        "discriminator": jax.nn.softplus(jnp.stack([-real_score, fake_score])).mean(),
        "generator": jax.nn.softplus(-judged).mean(),
    }
    return sum(losses.values()), losses


def make_trainer(width: int = 64, blocks: int = 2, **options: Any) -> PipelineTrainer:
    def model(rngs: nnx.Rngs) -> Gan:
        return Gan(width, blocks, rngs=rngs)

    rates = {"generator": 5e-4, "discriminator": 1e-3}
    each = {name: optax.adam(rate, b1=0.5) for name, rate in rates.items()}
    tx = optax.multi_transform(
        each, lambda params: nnx.map_state(lambda path, _: path[0], params)
    )
    train = Training(ema_decay=0.99)  # its average generates better than the last step
    return PipelineTrainer(model, tx, loss_fn, training=train, **options)


def at_real_size(**options: Any) -> tuple[PipelineTrainer, Batch]:
    """Twice 8 blocks of width 8,192 on 8,192 points, for `plan quote`."""
    real, noise = (
        jax.ShapeDtypeStruct((8192, size), jnp.bfloat16) for size in (POINT, NOISE)
    )
    trainer = make_trainer(8192, 8, precision="bfloat16", **options)
    return trainer, {"real": real, "noise": noise}


def batches(seed: int, size: int = 256) -> Iterator[Batch]:
    """Points around eight places of a circle, and noise to generate from."""
    rng = np.random.default_rng(seed)
    while True:
        places = rng.choice(PLACES, size)
        real = places + 0.1 * rng.normal(size=places.shape)
        noise = rng.normal(size=(size, NOISE))
        yield {"real": real.astype(np.float32), "noise": noise.astype(np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # else the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 2)  # takes effect on CPU alone
    trainer = make_trainer(
        num_stages=2, num_microbatches=4, logging=Logging(every=steps // 4)
    )
    trainer.fit(batches(seed=0), steps=steps)
    generator = trainer.gather_model(ema=True).generator
    points = generator(next(batches(seed=1, size=2048))["noise"])
    distances = jnp.linalg.norm(points[:, None] - PLACES, axis=-1)
    near = distances.min(-1) < 0.3  # three standard deviations
    counts = np.bincount(distances.argmin(-1)[near], minlength=len(PLACES))
    print(f"points at each place: {counts}, elsewhere: {2048 - counts.sum()}")


if __name__ == "__main__":
    main()
