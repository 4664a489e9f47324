"""The recipe of frozen towers, beside plain Flax, and the work that is not done for what is frozen."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning import plan as plan_for
from jaxpp_flax.trainers import Training
from tests.examples.running import load_example, run_example
from tests.helpers import slow

LEARNT = {"projector": nnx.PathContains("projector"), "all": nnx.Param}


@pytest.fixture
def recipe() -> SimpleNamespace:
    found = load_example("recipes/frozen_towers.py")
    found.make_batch.__globals__.update(VISION=32, VISION_BLOCKS=2, LANGUAGE_BLOCKS=2, PATCHES=4)
    return found


def trainer_of(recipe: SimpleNamespace, trained: str, **options: Any) -> PipelineTrainer:
    given = {"num_stages": 4, "num_microbatches": 4, "mesh": {}, "logging": False} | options
    training = Training(frozen=recipe.FROZEN[trained])
    return PipelineTrainer(recipe.Model(rngs=nnx.Rngs(0)), optax.adam(2e-3), recipe.loss_fn, training=training, **given)


@pytest.mark.parametrize("trained", ["projector", slow("all")])
def test_losses_are_those_of_plain_flax(recipe: SimpleNamespace, trained: str):
    rng, wrt = np.random.default_rng(0), nnx.All(nnx.Param, LEARNT[trained])
    batches = [recipe.make_batch(rng, 8) for _ in range(4)]
    trainer, model = trainer_of(recipe, trained), recipe.Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=wrt)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
        loss, gradients = nnx.value_and_grad(recipe.loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, gradients)
        return loss

    expected = [float(step(model, optimizer, batch)) for batch in batches]
    assert expected[-1] < expected[0]
    np.testing.assert_allclose([float(trainer.train_step(b)["loss"]) for b in batches], expected, rtol=1e-5)
    backwards = set(re.findall(r" bwd_(\d)__", trainer.compile(batches[0]).as_text()))
    assert backwards == ({"2"} if trained == "projector" else {"0", "1", "2"}), "the last stage has one task for both"


def test_the_balance_counts_no_backward_of_a_frozen_tower(recipe: SimpleNamespace):
    recipe.make_batch.__globals__.update(VISION_BLOCKS=1, LANGUAGE_BLOCKS=1)
    batch, plans = recipe.make_batch(np.random.default_rng(0), 8), {}
    for trained in recipe.FROZEN:
        plans[trained] = plan_for(trainer_of(recipe, trained, num_stages=2), batch, costs="flops")
    backwards = {trained: {b.name: b.backward / b.forward for b in plan.blocks} for trained, plan in plans.items()}
    for name, trained in backwards["all"].items():
        frozen = backwards["projector"][name]
        assert trained > 1.5, f"{name}: gradients of weights and inputs, each as much as the forward"
        if name.startswith("vision"):
            assert frozen == 0
        else:
            assert 0.5 < frozen < 0.8 * trained, f"{name}: gradients of inputs, which the projector needs"


@pytest.mark.slow
def test_all_is_trained_from_the_checkpoint_of_the_projector(tmp_path: Path):
    command = ["recipes/frozen_towers.py", "--output", str(tmp_path), "--steps", "40"]
    first = run_example(*command, "projector")
    second = run_example(*command, "all", "--start", str(tmp_path / "projector" / "40"))

    def losses(output: str) -> list[float]:
        return [float(loss) for loss in re.findall(r"^step \d+/\d+  loss ([\d.]+)", output, re.MULTILINE)]

    assert losses(second)[0] < losses(first)[-1] + 0.2, "it begins where the first run ended"
    assert losses(second)[-1] < losses(second)[0] - 0.2
