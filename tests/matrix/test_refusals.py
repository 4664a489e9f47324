"""What no pipeline can do is refused before anything runs, by the name of the leaf or line, with the remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.loop.partition import CarryError
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, treduce
from jaxpp_flax.layers import PipelineStage
from jaxpp_flax.schedules import Std1F1B
from tests.matrix.harness import mesh_of

DIM = 8
BATCH = np.ones((2, 4, DIM), np.float32)
WEIGHTS = [np.eye(DIM, dtype=np.float32)] * 2


def refusal(kind: type[Exception], step: Any, *args: Any, mesh: Any = None, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        mpmd_jit_with_loop(step, mesh or mesh_of(2), **options)(*args)
    text = str(caught.value)
    assert len(text) < 1000, "short enough to read"
    return text


class SharedNorm(nnx.Module):
    """One BatchNorm for both stages: its statistics would be written by both."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([PipelineStage(nnx.Linear(DIM, DIM, rngs=rngs)) for _ in range(2)])
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.first = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(self.norm(jnp.tanh(x @ self.first.kernel)))
        return x


def test_a_mutable_variable_written_by_two_stages():
    graphdef, params, rest = nnx.split(SharedNorm(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.mean(model(x) ** 2), nnx.split(model, nnx.Param, ...)[2]

    def step(params: Any, rest: Any, batch: Any) -> Any:
        def body(rest: Any, x: Any) -> Any:
            (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, x)
            return rest, (value, grads)

        return treduce(body, batch, Std1F1B(2), init=rest)

    text = refusal(CarryError, step, params, rest, BATCH)
    assert "carry['norm']['mean']" in text
    assert "read in the forward of stage 0 and written later, in the forward of stage 1" in text
    assert "need variables of their own in each" in text


def test_a_first_stage_that_needs_what_a_later_one_made():
    """An activation that depends on a later stage can only come through the carry."""

    def step(params: Any, memory: Any, batch: Any) -> Any:
        def body(memory: Any, x: Any) -> Any:
            x = mark_stage_end(jnp.tanh((x + memory) @ params[0]))  # the memory is read
            x = jnp.tanh(x @ params[1])
            return x, jnp.mean(x)

        return treduce(body, batch, Std1F1B(2), operation=Add, init=memory)

    text = refusal(CarryError, step, WEIGHTS, BATCH[0], BATCH)
    assert "the loop's carry (float32[4,8], first read at " in text
    assert "test_refusals.py" in text
    assert "forward of stage 0 and written later, in the forward of stage 1" in text


def train(params: Any, batch: Any, constraint: Any = None) -> Any:
    def loss(p: Any, x: Any) -> jax.Array:
        x = mark_stage_end(jnp.tanh(x @ p[0]))
        x = x if constraint is None else jax.lax.with_sharding_constraint(x, constraint)
        return jnp.mean((x @ p[1]) ** 2)

    return treduce(lambda x: jax.value_and_grad(loss)(params, x), batch, Std1F1B(2))


def test_a_constraint_with_an_axis_that_the_submesh_lacks():
    step = lambda p, b: train(p, b, P("model"))  # noqa: E731
    text = refusal(ValueError, step, WEIGHTS, BATCH, mesh=mesh_of(2, data=2))
    assert "axis: model of P" in text
    assert "may name ['data']. Use one of these, or make a mesh that has the axis" in text
