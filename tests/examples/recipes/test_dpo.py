"""The recipe for preferences: it learns, equals plain JAX, and holds each weight on one stage."""

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

from jaxpp_flax.layers import add_lora, merge_lora
from tests.examples.running import load_example, run_example


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    return load_example("recipes/dpo.py")


def tiny(recipe: SimpleNamespace) -> Any:
    return recipe.LlamaConfig(width=8, hidden=8, layers=2, heads=1, key_value_heads=1, head_size=8)


def test_equals_plain_jax_with_a_frozen_copy(recipe: SimpleNamespace):
    """The reference of plain JAX is a model of its own, without adapters: nothing of the switch is in it."""
    config = tiny(recipe)
    plain = recipe.Llama(config, rngs=nnx.Rngs(3))
    trainer = recipe.make_trainer(config, num_stages=2, num_microbatches=2, logging=False)
    start = add_lora(recipe.Llama(config, rngs=nnx.Rngs(3)), rank=8, alpha=16, layers="blocks/*", rngs=nnx.Rngs(4))
    trainer.set_weights(start)
    batches = recipe.pairs(seed=0, size=8, length=4)
    three = [next(batches) for _ in range(3)]
    losses = [float(trainer.train_step(batch)["loss"]) for batch in three]

    def loss_of(model: Any, texts: jax.Array) -> jax.Array:
        now, before = (
            jnp.stack([recipe.answer_log_probs(m, texts[:, i]) for i in (0, 1)], axis=1) for m in (model, plain)
        )
        chosen, rejected = (recipe.BETA * (now - before)).T
        return -jax.nn.log_sigmoid(chosen - rejected).mean()

    optimizer, expected = nnx.Optimizer(start, optax.adam(3e-3), wrt=nnx.LoRAParam), []

    @nnx.jit
    def step(model: Any, optimizer: Any, texts: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, texts)
        optimizer.update(model, gradients)
        return loss

    for batch in three:
        expected.append(float(step(start, optimizer, batch["texts"])))
    # Gradients are sums in another order; at the start the factors' are near 0, and Adam makes steps of 3e-3 of them.
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[0] == pytest.approx(np.log(2))
    assert [block.name for block in trainer.plan.blocks][:-1] == ["block_0", "block_1"], "one stage for both passes"
    assert type(merge_lora(trainer.gather_model()).blocks[0].gate) is nnx.Linear


@pytest.mark.slow
def test_it_learns():
    [accuracy, margin] = re.findall(r"accuracy (\S+), margin (\S+)", run_example("recipes/dpo.py", "--steps", "20"))[-1]
    assert float(accuracy) == 1, "a guess has 0.5"
    assert float(margin) > 1
