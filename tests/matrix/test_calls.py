"""Marks inside calls (jit, nn.jit, nnx.jit, custom_vjp), vmap inside the loss, and scans inside one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import linen
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.layers import PipelineStage
from jaxpp_flax.schedules import Schedule, Std1F1B, ZeroBubble
from tests.helpers import batch_of, slow
from tests.matrix.harness import check, count, mesh_of

STAGES, MICROBATCHES, ROWS, DIM = 3, 3, 16, 16
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)


def parameters() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(DIM, DIM)) / DIM**0.5).astype(np.float32) for _ in range(STAGES)]


def train_step(model: Callable[..., jax.Array]) -> Any:
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((model(p, b["x"]) - b["y"]) ** 2)

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (losses, grads)

    return step


@jax.jit
def jitted_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return mark_stage_end(jnp.tanh(x @ w))


def jit_around_each(p: Any, x: jax.Array) -> jax.Array:
    """One cached jit for every layer: its mark occurs several times under one identity."""
    for w in p[:-1]:
        x = jitted_layer(w, x)
    return jnp.tanh(x @ p[-1])


def jit_around_all(p: Any, x: jax.Array) -> jax.Array:
    return jax.jit(jit_around_each)(p, x)


@jax.custom_vjp
def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
    """A block whose gradient is not that of its forward: it is halved."""
    return mark_stage_end(jnp.tanh(x @ w))


def _scaled_forward(w: jax.Array, x: jax.Array) -> Any:
    y = scaled(w, x)
    return y, (w, x, y)


def _scaled_backward(saved: Any, cotangent: jax.Array) -> Any:
    w, x, y = saved
    inner = 0.5 * cotangent * (1 - y**2)
    return x.T @ inner, inner @ w.T


scaled.defvjp(_scaled_forward, _scaled_backward)


def custom_vjp_inside(p: Any, x: jax.Array) -> jax.Array:
    """Between two marks."""
    for w in p[:-1]:
        x = mark_stage_end(_unmarked_scaled(w, x))
    return jnp.tanh(x @ p[-1])


_unmarked_scaled = jax.custom_vjp(lambda w, x: jnp.tanh(x @ w))
_unmarked_scaled.defvjp(
    lambda w, x: (jnp.tanh(x @ w), (w, x, jnp.tanh(x @ w))),
    _scaled_backward,
)


@jax.custom_jvp
def soft(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda primals, tangents: (soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


def custom_jvp_around(p: Any, x: jax.Array) -> jax.Array:
    for w in p[:-1]:
        x = mark_stage_end(soft(x @ w))
    return soft(x @ p[-1])


def vmap_over_the_batch(p: Any, x: jax.Array) -> jax.Array:
    """The model is written for one example."""

    def one(x: jax.Array) -> jax.Array:
        for i, w in enumerate(p):
            x = jnp.tanh(x @ w)
            x = mark_stage_end(x) if i < STAGES - 1 else x
        return x

    return jax.vmap(one)(x)


def vmap_of_a_jit(p: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(jax.jit(jit_around_each), in_axes=(None, 0))(p, x)


def scan_inside(p: Any, x: jax.Array) -> jax.Array:
    """A loop over time in each stage stays one opaque equation."""
    for i, w in enumerate(p):
        x, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x, x[:4])  # noqa: B023
        x = mark_stage_end(x) if i < STAGES - 1 else x
    return x


def cond_inside(p: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(p):
        x = jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x @ w), x)  # noqa: B023
        x = mark_stage_end(x) if i < STAGES - 1 else x
    return x


# Bodies that stay whole are where a split backward may go wrong; those that are opened are like any other.
CASES = [
    *((model, Std1F1B) for model in (jit_around_all, custom_jvp_around, vmap_of_a_jit)),
    *((model, ZeroBubble) for model in (custom_vjp_inside, scan_inside, cond_inside)),
    *(slow(model, ZeroBubble) for model in (jit_around_each, vmap_over_the_batch)),
]


@pytest.mark.parametrize(("model", "schedule"), CASES, ids=lambda f: f.__name__)
def test_equals_plain(model: Callable[..., jax.Array], schedule: type[Schedule]):
    compiled, _ = check(train_step(model), parameters(), BATCH, mesh_of(STAGES), schedule(STAGES))
    # Every stage does its own work: a stage that did nothing would still be right.
    done = {(task[:3], task[-1]) for task, products in count(compiled, "dot_general").items() if products}
    assert done >= {("fwd", "0"), ("fwd", "1"), ("fwd", "2"), ("bwd", "1"), ("bwd", "0")}, done


def test_a_mark_inside_custom_vjp():
    """The rule's own forward holds a mark; its backward is written by hand and holds none."""

    def model(p: Any, x: jax.Array) -> jax.Array:
        x = mark_stage_end(jnp.tanh(x @ p[0]))
        return jnp.tanh(scaled(p[1], x) @ p[2])

    check(train_step(model), parameters(), BATCH, mesh_of(STAGES))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(STAGES):
            x = linen.PipelineStage(nn.jit(nn.Dense)(DIM))(x)
        return x


def test_nn_jit():
    model = nn.jit(LinenModel)()
    params = model.init(jax.random.key(0), BATCH["x"][0])
    check(train_step(model.apply), params, BATCH, mesh_of(STAGES))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([PipelineStage(nnx.Linear(DIM, DIM, rngs=rngs)) for _ in range(STAGES)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.jit(lambda block, x: jnp.tanh(block(x)))(block, x)
        return x


def test_nnx_jit():
    graphdef, params = nnx.split(NnxModel(nnx.Rngs(0)))
    model = lambda p, x: nnx.jit(lambda m, x: m(x))(nnx.merge(graphdef, p, copy=True), x)  # noqa: E731
    check(train_step(model), params, BATCH, mesh_of(STAGES))


@jax.tree_util.register_dataclass
@dataclass
class Examples:
    """A batch as many users write it."""

    x: Any
    y: Any


def test_a_dataclass_as_the_batch():
    def loss(p: Any, examples: Examples) -> jax.Array:
        return jnp.mean((jit_around_each(p, examples.x) - examples.y) ** 2)

    def step(params: Any, batch: Examples, schedule: Schedule | None) -> Any:
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (losses, grads)

    check(step, parameters(), Examples(**BATCH), mesh_of(STAGES))
