"""`memory_limit=`: stages recompute or offload what does not fit, and the training stays that of plain `jax.jit`."""

from __future__ import annotations

import jax
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.schedules import ResidualPlan, StageResiduals
from jaxpp_flax.schedules.planning import Hardware, describe
from jaxpp_flax.trainers import Assignment, Memory, MeshOptions
from tests.helpers import tree_allclose
from tests.trainers import models as m

CARD = Hardware(flops=1e9, host_bandwidth=1e12)  # copies are almost free, and recomputation is not
SLOW_LINK = Hardware(flops=1e12, host_bandwidth=1e3)


def trainer_of(assignment, **options) -> PipelineTrainer:
    options = {"num_stages": 4, "num_microbatches": 8, "schedule": "1f1b", "logging": False, **options}
    return PipelineTrainer(m.Model(8, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, assignment=assignment, **options)


def peak_without_limit(**options) -> float:
    trainer = trainer_of(Assignment(memory_limit=1e12), **options)
    trainer.compile(m.make_batch(512))
    assert trainer.plan.residuals.is_kept
    return max(trainer.plan.rank_bytes)


@pytest.mark.parametrize(
    ("options", "card", "does"),
    [
        ({}, SLOW_LINK, "recompute"),
        ({"num_stages": 8, "schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=4)}, CARD, "offload"),
    ],
    ids=["1f1b", "interleaved"],
)
def test_sixty_percent_of_the_peak_trains_as_plain_jit_does(options, card, does):
    batches = [m.make_batch(512, seed=seed) for seed in range(2)]
    limit = 0.6 * peak_without_limit(**options)
    trainer = trainer_of(Assignment(memory_limit=limit, hardware=card), **options)
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    plan = trainer.plan
    assert max(plan.rank_bytes) <= limit
    assert any(does in describe(stage) for stage in plan.residuals.stages)
    expected, after = m.plain_training(m.Model(8, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, batches, 8)
    tree_allclose(losses, expected, rtol=1e-5)
    tree_allclose(jax.device_get(trainer.state.params), after[-1], rtol=1e-5, atol=1e-6)
    # Not counted are a few arrays between stages, on their way to or from another rank.
    on_their_way = 4 * (64 * m.LENGTH * m.WIDTH * 4)
    for rank, predicted in zip(trainer.compile(batches[0]).memory_analysis(), plan.rank_bytes, strict=True):
        assert rank.argument_bytes + rank.peak_bytes <= predicted + on_their_way


def test_residuals_are_given_or_chosen():
    plan = ResidualPlan([StageResiduals(recompute=True)] * 4)
    with pytest.raises(ValueError, match=r"both Memory\(residuals=\) and memory_limit=1000.0 are given"):
        trainer_of(Assignment(memory_limit=1000.0), memory=Memory(residuals=plan))
