"""The recipe for reinforcement: samples, rewards and updates, and the update equals plain JAX."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax.layers import add_lora
from tests.examples.running import load_example, run_example


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    return load_example("recipes/grpo.py")


def test_updates_on_samples_equal_plain_jax_with_a_frozen_copy(recipe: SimpleNamespace):
    config = recipe.LlamaConfig(vocabulary=16, width=8, hidden=8, layers=2, heads=1, key_value_heads=1, head_size=8)
    plain = recipe.Llama(config, rngs=nnx.Rngs(3))
    start = add_lora(recipe.Llama(config, rngs=nnx.Rngs(3)), rank=8, alpha=16, layers="blocks/*", rngs=nnx.Rngs(4))
    trainer = recipe.make_trainer(config, num_stages=2, num_microbatches=2, logging=False)
    trainer.set_weights(start)
    prompts = np.random.default_rng(0).integers(0, 16, (2, recipe.PROMPT)).tolist()
    batch = recipe.sample(trainer, prompts, seed=0)
    assert batch["tokens"].shape == (2 * recipe.SAMPLES, recipe.PROMPT + recipe.NEW)
    np.testing.assert_array_equal(batch["tokens"][:: recipe.SAMPLES, : recipe.PROMPT], prompts)
    # Decoding with a cache adds the same numbers in another order.
    np.testing.assert_allclose(batch["old"], recipe.log_probs(start, batch["tokens"]), rtol=1e-4, atol=1e-5)
    groups = batch["advantage"].reshape(-1, recipe.SAMPLES)
    np.testing.assert_allclose(groups.mean(1), 0, atol=1e-5)
    # The mask counts a part of the tokens, which differs between microbatches.
    batch["counted"] *= np.random.default_rng(1).random(batch["counted"].shape) < 0.7
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(3)]

    def loss_of(model: Any, batch: Any) -> jax.Array:
        new, reference = (recipe.log_probs(m, batch["tokens"]) for m in (model, plain))
        ratio, gained = jnp.exp(new - batch["old"]), batch["advantage"][:, None]
        bounded = jnp.where(gained > 0, jnp.minimum(ratio, 1 + recipe.CLIP), jnp.maximum(ratio, 1 - recipe.CLIP))
        distance = jnp.exp(reference - new) - (reference - new) - 1
        return jnp.average(recipe.KL * distance - bounded * gained, weights=batch["counted"])

    optimizer, expected = nnx.Optimizer(start, optax.adam(2e-3), wrt=nnx.LoRAParam), []

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, gradients)
        return loss

    for _ in range(3):
        expected.append(float(step(start, optimizer, batch)))
    # Advantages of both signs cancel: the loss is a hundredth of its terms, so their last bits count a hundredfold.
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_reward_rises():
    rewards = [float(of) for of in re.findall(r"mean reward (\S+)", run_example("recipes/grpo.py"))]
    assert rewards[0] < 0.6, "by chance it is a half"
    assert rewards[-1] > rewards[0] + 0.1
