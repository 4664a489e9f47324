"""What the trace of a loss tells before anything runs: a loss whose microbatches do not add up to the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchStatisticsWarning, MicrobatchLossWarning
from tests.trainers import models as m

BATCH = m.make_xy(4) | {"mask": np.array([1, 0, 1, 1], np.float32)}


class Normed(m.Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(self.WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(super().__call__(x))


def make_trainer(loss_fn: Callable[..., Any], num_microbatches: int = 2, model: Any = m.Layers) -> PipelineTrainer:
    return PipelineTrainer(
        model(), optax.sgd(0.1), loss_fn, num_stages=1, num_microbatches=num_microbatches, logging=False
    )


def weighted(model, batch):
    return (jnp.square(model(batch["x"]) - batch["y"]).mean(-1) * batch["mask"]).sum(), batch["mask"].sum()


def with_metrics(model, batch):
    return m.squared_error(model, batch), {"masked": weighted(model, batch), "size": jnp.abs(model(batch["x"])).mean()}


def masked_mean(model, batch):
    total, weight = weighted(model, batch)
    return total / jnp.maximum(weight, 1)


def contrastive(model, batch):
    z = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def warned(trainer: PipelineTrainer, batch: Any = BATCH) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step_function(batch)
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def test_a_masked_mean_is_not_that_of_the_whole_batch_and_is_warned_of_once():
    trainer = make_trainer(masked_mean)
    with pytest.warns(MicrobatchLossWarning, match="depends on the values in the microbatch") as caught:
        step = trainer.step_function(BATCH)
    (text,) = [str(w.message) for w in caught]
    line = masked_mean.__code__.co_firstlineno + 2
    assert f"`div` at {__file__}:{line}:" in text
    assert "(masked_mean)" in text
    assert "Return the sum and this divisor, (loss_sum, weight)" in text
    assert "2 microbatches" in text
    larger = m.make_xy(8) | {"mask": np.ones(8, np.float32)}
    assert warned(trainer, larger) == [], "another structure of a batch says nothing new"
    split = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), BATCH)
    _, metrics = jax.jit(step)(trainer.state, split)
    whole = float(nnx.jit(masked_mean)(m.Layers(), BATCH))
    assert abs(float(metrics["loss"]) - whole) > 1e-3, "the warning has a reason"


def test_the_remedies_and_one_microbatch_are_silent():
    def scaled_back(model, batch):
        return masked_mean(model, batch) * batch["mask"].sum(), batch["mask"].sum()

    for loss_fn in (m.squared_error, weighted, with_metrics, scaled_back):
        assert warned(make_trainer(loss_fn)) == []
    for loss_fn in (masked_mean, contrastive):
        assert warned(make_trainer(loss_fn, num_microbatches=1)) == []


def test_a_scalar_of_the_batch_is_a_constant():
    def tempered(model, batch):
        return m.squared_error(model, batch) / batch["temperature"]

    assert warned(make_trainer(tempered), {**BATCH, "temperature": np.float32(0.5)}) == []


def test_a_loss_across_examples_names_the_place_and_the_loss_of_two_parts():
    def as_pair(model, batch):
        return contrastive(model, batch) * 4, 4

    for loss_fn in (contrastive, as_pair):
        (text,) = warned(make_trainer(loss_fn))
        assert text.startswith("MicrobatchLossWarning: ")
        assert text.endswith("[JPF904]")
        assert "not by a mean or a sum: `dot_general` at" in text
        assert "(contrastive)" in text
        assert "loss_fn=WholeBatchLoss(embed_fn, loss_fn)" in text
        assert "weight" not in text.partition(". ")[2]


def test_batch_norm_has_a_warning_of_its_own():
    statistics, quotient = warned(make_trainer(masked_mean, model=Normed))
    assert statistics.startswith(BatchStatisticsWarning.__name__)
    assert "`div` at" in quotient
    assert "combines examples" not in quotient
    (statistics,) = warned(make_trainer(m.squared_error, model=Normed))
    assert statistics.startswith(BatchStatisticsWarning.__name__)
