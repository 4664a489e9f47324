"""The recipe of a generator and a discriminator: each follows its own loss, and points come at all places."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tests.examples.running import load_example, run_example


def test_equals_two_gradients_of_plain_jax():
    """Plain JAX takes each network's gradient of its own loss; neither knows of constants inside of a loss."""
    recipe = load_example("recipes/gan.py")
    trainer = recipe.make_trainer(width=8, blocks=1, num_stages=2, num_microbatches=2, logging=False)
    start = recipe.Gan(8, 1, rngs=nnx.Rngs(3))
    trainer.set_weights(start)
    batches = recipe.batches(seed=0, size=16)
    three = [next(batches) for _ in range(3)]
    losses = [trainer.train_step(batch) for batch in three]

    (generator_def, generator), (discriminator_def, discriminator) = map(
        nnx.split, (start.generator, start.discriminator)
    )
    slow, fast = optax.adam(5e-4, b1=0.5), optax.adam(1e-3, b1=0.5)

    def discriminator_loss(discriminator: Any, generator: Any, batch: Any) -> jax.Array:
        network, fake = nnx.merge(discriminator_def, discriminator), nnx.merge(generator_def, generator)(batch["noise"])
        return (jax.nn.softplus(-network(batch["real"])) + jax.nn.softplus(network(fake))).mean() / 2

    def generator_loss(generator: Any, discriminator: Any, batch: Any) -> jax.Array:
        fake = nnx.merge(generator_def, generator)(batch["noise"])
        return jax.nn.softplus(-nnx.merge(discriminator_def, discriminator)(fake)).mean()

    @jax.jit
    def step(generator: Any, discriminator: Any, states: Any, batch: Any) -> Any:
        d_loss, d_grads = jax.value_and_grad(discriminator_loss)(discriminator, generator, batch)
        g_loss, g_grads = jax.value_and_grad(generator_loss)(generator, discriminator, batch)
        d_updates, d_state = fast.update(d_grads, states[0])
        g_updates, g_state = slow.update(g_grads, states[1])
        generator, discriminator = (
            optax.apply_updates(generator, g_updates),
            optax.apply_updates(discriminator, d_updates),
        )
        return generator, discriminator, (d_state, g_state), {"discriminator": d_loss, "generator": g_loss}

    states = fast.init(discriminator), slow.init(generator)
    for batch, ours in zip(three, losses, strict=True):
        generator, discriminator, states, expected = step(generator, discriminator, states, batch)
        for name, value in expected.items():
            np.testing.assert_allclose(float(ours[name]), float(value), rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_it_generates_points_at_all_places():
    [counts, elsewhere] = re.findall(r"\[(.*)\], elsewhere: (\d+)", run_example("recipes/gan.py"))[-1]
    assert min(map(int, counts.split())) > 20, "of 2048 points at 8 places"
    assert int(elsewhere) < 1024, "of random points of the square more than three quarters are elsewhere"
