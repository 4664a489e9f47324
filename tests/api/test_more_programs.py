"""Further patterns of JaxPP's documentation and tests: dropout, results that are inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh

import jaxpp_flax.api as jaxpp
from tests.helpers import tree_allclose

WIDTH, MICROBATCHES = 8, 4


def mesh_of(stages: int) -> jaxpp.MpmdMesh:
    return jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:stages]), ("stage",)), "stage")


class TrainState(train_state.TrainState):
    key: jax.Array


class DropoutModel(nn.Module):
    stages: int

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> Any:
        hidden = x
        for stage in range(self.stages):
            hidden = nn.Dropout(rate=0.5, deterministic=False)(nn.tanh(nn.Dense(WIDTH)(hidden)))
            if stage < self.stages - 1:
                hidden = jaxpp.mark_stage_end(hidden)
        return hidden + y, x, y


def test_dropout_and_results_that_are_inputs():
    model, stages = DropoutModel(2), 2

    def train_step(state: TrainState, inputs: Any, targets: jax.Array) -> Any:
        key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Any, data: Any) -> Any:
            (x, y), target = data
            logits, x_out, y_out = state.apply_fn({"params": params}, x=x, y=y, rngs={"dropout": key})
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            return loss.mean(), (logits, x_out, y_out)

        (loss, aux), grads = jaxpp.treduce(
            partial(jax.value_and_grad(loss_fn, has_aux=True, argnums=0), state.params),
            (inputs, targets),
            schedule=jaxpp.Eager1F1B(num_stages=stages),
        )
        return state.apply_gradients(grads=grads), loss.mean(), aux

    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (jax.random.uniform(key, (MICROBATCHES, 2, WIDTH)) for key in keys[:2])
    targets = jnp.arange(MICROBATCHES * 2).reshape(MICROBATCHES, 2) % WIDTH
    params = model.init({"params": keys[0], "dropout": keys[1]}, x[0], y[0])["params"]
    start = TrainState.create(apply_fn=model.apply, params=params, key=keys[2], tx=optax.sgd(0.1, momentum=0.9))
    pipelined = jaxpp.mpmd_jit_with_loop(train_step, mpmd_mesh=mesh_of(stages))
    plain = jax.jit(train_step)
    states, expected = (start, start), None
    for _ in range(2):
        (state, *rest), (plain_state, *expected) = (
            step(state, (x, y), targets) for step, state in zip((pipelined, plain), states, strict=True)
        )
        states = state, plain_state
        tree_allclose((state.params, state.opt_state, rest), (plain_state.params, plain_state.opt_state, expected))
    loss, (_, x_out, y_out) = rest
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    np.testing.assert_array_equal(x_out, x)
    np.testing.assert_array_equal(y_out, y)
