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

from jaxpp_flax import PipelineStage, PipelineTrainer, mark_stage_end
from jaxpp_flax.trainers.step import builder
from jaxpp_flax.verify import verify
from tests.trainers import models as m
from tests.verify.test_whole_step import changed_state, doubled_summand

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")

BATCH = m.make_xy(8)
OPTIONS: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False}


def noisy(model: Any, batch: Any, *, rngs: nnx.Rngs) -> Any:
    errors = jnp.square(model(batch["x"]) - batch["y"])
    return (errors * jax.random.bernoulli(rngs.noise(), 0.5, errors.shape)).mean()


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
    "scales of fp8": fp8,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_compared_and_agrees(name: str):
    report = verify(RIGHT[name](), BATCH)
    assert report.agrees, report
    assert not report.notes


def lost_scales(patch: pytest.MonkeyPatch) -> None:
    changed_state(model_state=lambda old, new: old)(patch)


@pytest.mark.parametrize(
    "plant",
    [lost_scales, doubled_summand, lambda patch: patch.setattr(builder, "Max", builder.Add)],
    ids=["scales are not written", "gradients are doubled", "scales are added up"],
)
def test_a_fault_beside_fp8_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    first = verify(fp8(), BATCH).first
    assert first is not None
    assert first.is_whole
