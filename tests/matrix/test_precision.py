"""Mixed precision: bfloat16 and float16 compute with float32 weights, and what is summed in which dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import linen
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Schedule, Std1F1B
from tests.helpers import batch_of
from tests.matrix.harness import check, mesh_of
from tests.trainers.models import Layers

STAGES, MICROBATCHES, ROWS, DIM = 2, 4, 16, 16
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)
# One rounding of bfloat16 is 2^-8, of float16 2^-11. Both runs do the same operations in the same dtype; only where XLA
# keeps a longer intermediate in a fusion may a rounding fall away, here or there: a few of them, never dozens.
BOUNDS = {jnp.bfloat16: 4 * 2**-8, jnp.float16: 4 * 2**-11}


class LinenModel(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(linen.PipelineStage(nn.Dense(DIM, dtype=self.dtype))(x))
        return x


def model_of(kind: str, dtype: Any) -> tuple[Any, Any]:
    if kind == "linen":
        model = LinenModel(dtype)
        return model.apply, model.init(jax.random.key(0), BATCH["x"][0])
    graphdef, params = nnx.split(Layers(2, DIM, dtype=dtype))
    return lambda p, x: nnx.merge(graphdef, p, copy=True)(x), params


def train_step(apply: Any, cast_gradients: Any = None, scale: float = 1.0) -> Any:
    def loss(p: Any, b: Any) -> jax.Array:
        return scale * jnp.mean((apply(p, b["x"]).astype(jnp.float32) - b["y"]) ** 2)

    def body(params: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, b)
        return value, grads if cast_gradients is None else jax.tree.map(lambda g: g.astype(cast_gradients), grads)

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = treduce(lambda b: body(params, b), batch, schedule)
        new = jax.tree.map(lambda p, g: p - 0.1 / scale * g.astype(jnp.float32), params, grads)
        return new, (losses, grads)

    return step


def accumulated_in(compiled: Any) -> set[str]:
    (loop,) = compiled.placed.loops
    return {str(a.state.aval.dtype) for a in loop.partition.accumulators if a.state.aval.shape != (MICROBATCHES,)}


OPTIMIZED = (pytest.mark.slow, pytest.mark.full_compilation)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("nnx", jnp.bfloat16, id="nnx"),
        pytest.param("linen", jnp.float16, id="linen"),
        pytest.param("nnx", jnp.float16, marks=OPTIMIZED),
        pytest.param("linen", jnp.bfloat16, marks=OPTIMIZED),
    ],
)
def test_low_precision_compute(kind: str, dtype: Any):
    """Activations cross in the low precision, weights and sums of gradients stay in float32."""
    apply, params = model_of(kind, dtype)
    step = train_step(apply, scale=128.0 if dtype is jnp.float16 else 1.0)
    compiled, history = check(step, params, BATCH, mesh_of(STAGES), Std1F1B(STAGES), rtol=BOUNDS[dtype])
    (loop,) = compiled.placed.loops
    forward, *_ = loop.partition.tasks
    crossing = {str(v.aval.dtype) for v in forward.graph.outputs if v.aval.size > 1}
    assert crossing == {jnp.dtype(dtype).name}
    assert accumulated_in(compiled) == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(history[-1][0])} == {"float32"}


def test_gradients_summed_in_bfloat16():
    """By choice: cast in the body, and the accumulators are half as large."""
    apply, params = model_of("nnx", jnp.bfloat16)
    step = train_step(apply, cast_gradients=jnp.bfloat16)
    # Four microbatches: four sums, each with a rounding of its own, on top of the model's.
    compiled, _ = check(step, params, BATCH, mesh_of(STAGES), Std1F1B(STAGES), rtol=8 * 2**-8)
    assert accumulated_in(compiled) == {"bfloat16"}
