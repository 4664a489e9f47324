"""Python numbers among a model's variables train as in plain JAX, however the model is given and divided."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers.model.adapter import numbers_as_arrays
from jaxpp_flax.trainers.model.linen_model import LinenModel
from tests.helpers import slow
from tests.trainers.models import Chain

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


class Scaled(nnx.Module):
    """A dense layer with a trained number, a number and a count."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.gain, self.share, self.depth = nnx.Param(0.5), nnx.Variable(0.3), nnx.Variable(2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.gain.get_value() * jnp.tanh(self.dense(x) * self.share.get_value()) ** self.depth.get_value()


def make(rngs: nnx.Rngs) -> nnx.Module:
    return Chain(PipelineStage(Scaled(rngs), name=f"block_{i}") for i in range(2))


def loss_fn(model: Any, x: Any) -> jax.Array:
    return (model(x) ** 2).mean()


def plain_losses() -> list[float]:
    graphdef, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    step = jax.jit(jax.value_and_grad(lambda params: loss_fn(nnx.merge(graphdef, params, rest), X)))
    losses = []
    for _ in range(2):
        loss, gradients = step(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("model", "num_stages"), [(make(nnx.Rngs(0)), 1), slow(make(nnx.Rngs(0)), 2), (make, 2)])
def test_python_numbers_in_variables_train(model: Any, num_stages: int):
    trainer = PipelineTrainer(model, optax.sgd(0.1), loss_fn, num_stages=num_stages, num_microbatches=2, logging=False)
    losses = [float(trainer.train_step(X)["loss"]) for _ in range(2)]
    np.testing.assert_allclose(losses, plain_losses(), rtol=1e-5)
    assert trainer.gather_model().blocks[0].gain.get_value() != 0.5


def test_numbers_in_a_linen_model_s_collections_are_arrays():
    variables = {"params": {"scale": 0.5}, "constants": {"depth": 2}}
    _, params, rest = LinenModel.take_apart(nn.Dense(1), variables, jax.random.key(0), None)
    assert (params["scale"].dtype, rest["collections"]["constants"]["depth"].dtype) == (jnp.float32, jnp.int32)


def test_an_array_is_what_it_was():
    leaf = jnp.zeros(2, jnp.bfloat16)
    assert numbers_as_arrays([leaf])[0] is leaf
