"""The recipe of balanced experts, beside the same step in plain Flax."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Training
from tests.examples.running import load_example, run_example
from tests.helpers import tree_allclose

RATE = 0.1


def plain_step(recipe: SimpleNamespace):
    """The whole batch at once: no expert drops a token, so no token depends on how the batch is divided."""
    move = recipe.move_biases(RATE)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
        loss, gradients = nnx.value_and_grad(recipe.loss_fn)(model, batch)
        optimizer.update(model, gradients)
        move(model, {"loss": loss})
        return loss

    return step


def test_losses_loads_and_biases_are_those_of_plain_flax():
    recipe = load_example("recipes/balance_experts.py")
    rng, tx = np.random.default_rng(0), optax.adam(3e-3)
    batches = [recipe.make_batch(rng, 8, 8) for _ in range(8)]
    trainer = PipelineTrainer(
        recipe.Model(rngs=nnx.Rngs(0)), tx, recipe.loss_fn, num_stages=2, num_microbatches=2, mesh={}, logging=False,
        training=Training(after_update=recipe.move_biases(RATE)),
    )  # fmt: skip
    model, step = recipe.Model(rngs=nnx.Rngs(0)), plain_step(recipe)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    expected = [float(step(model, optimizer, batch)) for batch in batches]
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # Loads and biases are counts and sums of equal steps: equal to the bit.
    others = nnx.state(model, nnx.Not(nnx.Param))
    tree_allclose(nnx.state(trainer.gather_model(), nnx.Not(nnx.Param)), others, rtol=0, atol=0)
    bias = np.asarray(model.blocks[0].experts.bias[...])
    assert np.ptp(bias) > 0


@pytest.mark.slow
def test_the_experts_become_even():
    output = run_example("recipes/balance_experts.py", "--steps", "150")
    first, last = re.split(r"step 150: ", output)
    busiest = [max(map(float, re.findall(r"\d+\.\d", line))) for line in re.findall("  block .*", first + last)]
    assert len(busiest) == 8
    assert max(busiest[:4]) > 40, "the router of one block sends nearly half of the tokens to one expert"
    assert max(busiest[4:]) < 20, "even is 12.5; this setting reached 16"
    [loss] = re.findall(r"best loss (\d+\.\d+) at step 1[45]\d", output)
    assert float(loss) < 1.5, "a uniform guess has 5.5; this setting reached 0.6"
