"""Leaves of four bits: frozen weights beside trained scales, as quantised models have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.checkpoint.format.paths import flatten
from tests.helpers import slow, tree_allclose

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


class Levels(nnx.Variable):
    """Integers or floats of four bits, which no gradient reaches."""


class Block(nnx.Module):
    def __init__(self, dtype: Any, *, rngs: nnx.Rngs) -> None:
        numbers = 2 * jax.random.normal(rngs.params(), (WIDTH, WIDTH))
        self.levels = Levels((jnp.abs(numbers) if dtype == jnp.uint4 else numbers).astype(dtype))
        self.scale = nnx.Param(jnp.full(WIDTH, 0.1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ (self.levels[...].astype(jnp.float32) * self.scale[...]))


def model_of(dtype: Any, seed: int = 0) -> nnx.Module:
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(*[PipelineStage(Block(dtype, rngs=rngs)) for _ in range(4)])


def loss_fn(model: Any, x: Any) -> jax.Array:
    return jnp.square(model(x)).mean()


def trainer_of(model: nnx.Module, num_stages: int, **axes: int) -> PipelineTrainer:
    options: dict[str, Any] = {"num_microbatches": 4, "mesh": axes, "logging": False}
    return PipelineTrainer(model, optax.sgd(0.1), loss_fn, num_stages=num_stages, **options)


@pytest.mark.parametrize(
    ("dtype", "num_stages", "axes"),
    [
        (jnp.int4, 2, {"data": 2}), (jnp.uint4, 2, {}), (jnp.int4, 1, {}), (jnp.float4_e2m1fn, 2, {}),
        slow(jnp.uint4, 2, {"data": 2}), slow(jnp.float4_e2m1fn, 1, {"data": 2}),
    ],
)  # fmt: skip
def test_equals_plain_flax_and_comes_back_from_disk(dtype: Any, num_stages: int, axes: dict[str, int], tmp_path: Path):
    plain, trainer = model_of(dtype), trainer_of(model_of(dtype), num_stages, **axes)
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx.jit(nnx.value_and_grad(loss_fn))
    for _ in range(2):
        expected, gradients = step(plain, X)
        optimizer.update(plain, gradients)
        np.testing.assert_allclose(trainer.train_step(X)["loss"], expected, rtol=1e-5)
    tree_allclose(nnx.state(trainer.gather_model(), nnx.Param), nnx.state(plain, nnx.Param))
    trainer.save(tmp_path / "saved")
    other = trainer_of(model_of(dtype, seed=1), 4)
    other.restore(tmp_path / "saved")
    before, after = (flatten(nnx.state(of.gather_model()))[0] for of in (trainer, other))
    tree_allclose(after, before, rtol=0, atol=0)
    assert sum(leaf.dtype == dtype for leaf in after.values()) == 4
