"""The whole step against Flax and Optax alone, for models whose call writes parameters, vectors or scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer, WholeBatchLoss, mark_stage_end
from jaxpp_flax.trainers import MicrobatchStateWarning
from jaxpp_flax.trainers.step import builder
from jaxpp_flax.trainers.writes import dependencies
from jaxpp_flax.verify import verify
from tests.helpers import slow, slow_but
from tests.trainers import models as m
from tests.verify.test_whole_step import changed_state, doubled_summand

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")

BATCH = m.make_xy(8)
OPTIONS: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False}


def noisy(model: Any, batch: Any, *, rngs: nnx.Rngs) -> Any:
    errors = jnp.square(model(batch["x"]) - batch["y"])
    return (errors * jax.random.bernoulli(rngs.noise(), 0.5, errors.shape)).mean()


def noisy_outputs(model: Any, batch: Any, *, rngs: nnx.Rngs) -> Any:
    outputs = model(batch["x"])
    return outputs * jax.random.bernoulli(rngs.noise(), 0.5, outputs.shape)


IN_TWO_PARTS = WholeBatchLoss(noisy_outputs, lambda outputs, batch: jnp.square(outputs - batch["y"]).mean())


def normed(norm: Any, loss_fn: Callable[..., Any] = m.squared_error) -> PipelineTrainer:
    rngs = nnx.Rngs(0)
    layers = [PipelineStage(norm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)) for _ in range(2)]
    return PipelineTrainer(nnx.Sequential(*layers), optax.sgd(0.1), loss_fn, **OPTIONS)


class Fp8(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = [nn.Dense(4, dot_general_cls=nn.Fp8DotGeneralOp) for _ in range(2)]
        return layers[1](mark_stage_end(nn.tanh(layers[0](x))))


def fp8() -> PipelineTrainer:
    variables = Fp8().init(jax.random.key(0), BATCH["x"])
    return PipelineTrainer(Fp8(), optax.sgd(0.1), m.squared_error, variables=variables, **OPTIONS)


RIGHT: dict[str, Callable[[], PipelineTrainer]] = {
    "written parameters": lambda: normed(nnx.WeightNorm),
    "vectors of parameters": lambda: normed(nnx.SpectralNorm),
    "and random numbers": lambda: normed(nnx.SpectralNorm, noisy),
    "and random numbers, in two parts": lambda: normed(nnx.SpectralNorm, IN_TWO_PARTS),
    "scales of fp8": fp8,
}


@pytest.mark.parametrize("name", slow_but(RIGHT, "and random numbers, in two parts", "scales of fp8"))
def test_a_right_step_is_compared_and_agrees(name: str):
    report = verify(RIGHT[name](), BATCH)
    assert report.agrees, report
    assert not report.notes


def lost_scales(patch: pytest.MonkeyPatch) -> None:
    changed_state(model_state=lambda old, new: old)(patch)


@pytest.mark.parametrize(
    "plant",
    [lost_scales, slow(doubled_summand), lambda patch: patch.setattr(builder, "Max", builder.Add)],
    ids=["scales are not written", "gradients are doubled", "scales are added up"],
)
def test_a_fault_beside_fp8_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    first = verify(fp8(), BATCH).first
    assert first is not None
    assert first.is_whole


# ---------------------------------------------------------------------- the reference decides what is written once


def all_carried(patch: pytest.MonkeyPatch) -> None:
    """The trainer takes what is written once a step for what goes from microbatch to microbatch."""
    right = dependencies.Writes

    def wrong(carried: Any, once: Any, **others: Any) -> Any:
        return right(carried=tuple(sorted((*carried, *once))), once=(), **others)

    patch.setattr(dependencies, "Writes", wrong)  # what find_writes returns, whoever calls it


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning")
@pytest.mark.parametrize("loss_fn", [m.squared_error, noisy], ids=["at once", "in parts"])
def test_a_vector_that_moves_in_each_microbatch_is_found(loss_fn: Any, monkeypatch: pytest.MonkeyPatch):
    all_carried(monkeypatch)
    report = verify(normed(nnx.SpectralNorm, loss_fn), BATCH)
    assert report.first is not None, report
    assert report.first.is_whole


class Counting(nnx.Module):
    """A layer that counts its calls."""

    def __init__(self, layer: nnx.Module, *, rngs: nnx.Rngs) -> None:
        self.layer, self.calls = layer, nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.layer(x)


@pytest.mark.parametrize("loss_fn", [m.squared_error, noisy], ids=["at once", "in parts"])
def test_a_counter_of_which_the_trainer_has_warned_agrees(loss_fn: Any):
    with pytest.warns(MicrobatchStateWarning):
        report = verify(normed(Counting, loss_fn), BATCH)
    assert report.agrees, report
    assert report.facts["reference"] == "one microbatch after another"


class Watching(nnx.Module):
    """A layer that keeps a metric: the mean of its last call."""

    def __init__(self, layer: nnx.Module, *, rngs: nnx.Rngs) -> None:
        self.layer, self.last = layer, nnx.metrics.MetricState(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.layer(x)
        self.last[...] = jax.lax.stop_gradient(y).mean(0)
        return y


def test_a_metric_of_the_last_microbatch_agrees_with_a_note():
    """The trainer does not warn of metrics; gradients and parameters are those of the whole batch."""
    report = verify(normed(Watching), BATCH)
    assert report.agrees, report
    assert "a call with the whole batch writes other values" in str(report)
