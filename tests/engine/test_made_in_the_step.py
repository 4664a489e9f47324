"""Tasks without inputs: parameters, optimizer state and carries that the step itself makes, on every rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, treduce, treduce_i
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain_loss, mesh_of
from tests.helpers import DIM, batch_of, slow, tree_allclose

BATCH = batch_of(2)
TX = optax.sgd(0.1, momentum=0.9)
# Sums of two microbatches in float32.
RTOL = 1e-5


def made(batch: Any) -> Any:
    """Random parameters, and zeros for biases and momentum."""
    params = [{"w": jax.random.uniform(jax.random.key(i), (DIM, DIM)) - 0.5, "b": jnp.zeros(DIM)} for i in range(2)]
    state = TX.init(params)

    def body(seen: jax.Array, b: Any) -> Any:
        loss, grads = jax.value_and_grad(chain_loss)(params, b)
        return seen + loss, (loss, grads)

    seen, (losses, grads) = treduce(body, batch, Std1F1B(2), operation=(Concat(), Add), init=jnp.zeros(()))
    updates, state = TX.update(grads, state, params)
    return seen, losses, grads, optax.apply_updates(params, updates), state


def carried(batch: Any) -> Any:
    """A carry of zeros that only the last rank reads, beside weights of ones."""

    def body(seen: jax.Array, i: jax.Array) -> Any:
        x = jax.lax.dynamic_index_in_dim(batch["x"], i, 0, keepdims=False)
        y = mark_stage_end(jnp.tanh(x @ jnp.ones((DIM, DIM)))) @ jnp.full((DIM, DIM), 0.5)
        return seen + y.sum(0)[:4], (y**2).sum()

    return treduce_i(body, 2, Std1F1B(2), Add, init=jnp.zeros(4))


@pytest.mark.parametrize(("kind", "data"), [slow(AxisType.Auto, 1), slow(AxisType.Auto, 2), (AxisType.Explicit, 2)])
def test_equals_plain(kind: AxisType, data: int):
    mesh = mesh_of(2, kind, data=data)
    step = lambda batch: (made(batch), carried(batch))  # noqa: E731
    pipelined = mpmd_jit_with_loop(step, mesh, in_specs=P(None, "data"))
    compiled = pipelined.compile(BATCH)
    without = [task for task in compiled.program.tasks if not task.graph.inputs]
    assert any(task.rank == 1 for task in without)
    tree_allclose(compiled(BATCH), jax.jit(step)(BATCH), rtol=RTOL)
