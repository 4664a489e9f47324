"""Rematerialisation: the same gradients, and a stage recomputes itself alone, in its own backward task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpp_flax import linen
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.layers import PipelineStage
from jaxpp_flax.schedules import Schedule, ZeroBubble
from tests.helpers import batch_of, slow, slow_but
from tests.matrix.harness import check, count, mesh_of

STAGES, MICROBATCHES, ROWS, DIM = 3, 3, 16, 16
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)


def parameters() -> list[np.ndarray]:
    """Two products in each stage."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(2, DIM, DIM)) / DIM**0.5).astype(np.float32) for _ in range(STAGES)]


def layer(w: Any, x: jax.Array) -> jax.Array:
    return jnp.sin(jnp.sin(x @ w[0]) @ w[1])


def unmarked(p: Any, x: jax.Array, wrap: Callable[..., Any] = lambda f: f) -> jax.Array:
    for i, w in enumerate(p):
        x = wrap(layer)(w, x)
        x = mark_stage_end(x) if i < STAGES - 1 else x
    return x


def inside(p: Any, x: jax.Array) -> jax.Array:
    """Around each layer, with the marks between them."""
    return unmarked(p, x, jax.checkpoint)


def around_each(p: Any, x: jax.Array) -> jax.Array:
    """Around each layer together with its mark."""
    marked = jax.checkpoint(lambda w, x: mark_stage_end(layer(w, x)))
    for w in p[:-1]:
        x = marked(w, x)
    return jax.checkpoint(layer)(p[-1], x)


def around_all(p: Any, x: jax.Array) -> jax.Array:
    """Around the whole model."""
    return jax.checkpoint(unmarked)(p, x)


def across(p: Any, x: jax.Array) -> jax.Array:
    """A region that begins in one stage and ends in the next."""
    x = jnp.sin(x @ p[0][0])

    @jax.checkpoint
    def middle(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.sin(mark_stage_end(jnp.sin(x @ first)) @ second)

    x = middle(x, p[0][1], p[1][0])
    x = middle(x, p[1][1], p[2][0])
    return jnp.sin(x @ p[2][1])


def nested(p: Any, x: jax.Array) -> jax.Array:
    """Around the whole model and around each of its layers."""
    return jax.checkpoint(inside)(p, x)


def saved_products(p: Any, x: jax.Array) -> jax.Array:
    """With a policy: products are saved, so that nothing but element-wise work is done again."""
    return jax.checkpoint(unmarked, policy=jax.checkpoint_policies.dots_saveable)(p, x)


def named(p: Any, x: jax.Array) -> jax.Array:
    """With a policy by name: the first product of each layer is saved, the second is computed again."""

    def one(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(checkpoint_name(x @ w[0], "first")) @ w[1])

    policy = jax.checkpoint_policies.save_only_these_names("first")
    return unmarked(p, x, lambda _: jax.checkpoint(one, policy=policy))


def train_step(model: Callable[..., jax.Array]) -> Any:
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((model(p, b["x"]) - b["y"]) ** 2)

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (losses, grads)

    return step


# Products of a backward: two for each matrix (one, where the batch is its input), and what is recomputed.
# A layer of two products: recomputing it whole costs 1 (the second product's result is not needed) or 2.
PLAIN = {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4, "bwd_0": 3}
CASES: dict[str, tuple[Callable[..., jax.Array], dict[str, int]]] = {
    "unmarked": (unmarked, PLAIN),
    "inside": (inside, {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4 + 2, "bwd_0": 3 + 2}),
    "around_each": (around_each, {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4 + 2, "bwd_0": 3 + 2}),
    "around_all": (around_all, {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4 + 2, "bwd_0": 3 + 2}),
    "across": (across, {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4 + 2, "bwd_0": 3 + 1}),
    "nested": (nested, {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4 + 2, "bwd_0": 3 + 2}),
    "saved_products": (saved_products, PLAIN),
    "named": (named, {"fwd_0": 2, "fwd_1": 2, "bwd_1": 4 + 1, "bwd_0": 3 + 1}),
}


@pytest.mark.parametrize("case", slow_but(CASES, "inside", "across", "named"))
def test_recomputation(case: str):
    model, expected = CASES[case]
    compiled, _ = check(train_step(model), parameters(), BATCH, mesh_of(STAGES))
    products = count(compiled, "dot_general")
    last = products.pop("fwd_bwd_2")
    assert products == expected
    # The last stage runs at once: its own recomputation at most, never an earlier stage's.
    assert 2 + 4 <= last <= 2 + 4 + 2
    # The memory is what remat is for: without it, a stage hands on what its backward reads beside its result.
    (kept,) = [len(task.graph.outputs) for task in compiled.program.tasks if task.name == "fwd_1"]
    if case in ("unmarked", "around_all"):
        assert (kept == 1) is (case == "around_all")


def test_under_a_split_backward():
    check(train_step(across), parameters(), BATCH, mesh_of(STAGES), ZeroBubble(STAGES))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.second(jnp.sin(self.first(x))))


class NnxRemat(NnxBlock):
    __call__ = nnx.remat(NnxBlock.__call__)  # type: ignore[assignment]


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, way: str) -> None:
        kind = NnxRemat if way == "method" else NnxBlock
        self.blocks = nnx.List([PipelineStage(kind(rngs)) for _ in range(STAGES)])
        self.way = way

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            if self.way == "around":
                x = nnx.remat(lambda block, x: block(x))(block, x)
            else:
                x = block(x)
        return x


@pytest.mark.parametrize("way", [slow("method"), slow("around"), "whole"])
def test_nnx_remat(way: str):
    graphdef, params = nnx.split(NnxModel(nnx.Rngs(0), way))

    def model(p: Any, x: jax.Array) -> jax.Array:
        module = nnx.merge(graphdef, p, copy=True)
        return nnx.remat(lambda m, x: m(x))(module, x) if way == "whole" else module(x)

    products = count(check(train_step(model), params, BATCH, mesh_of(STAGES)).compiled, "dot_general")
    assert (products["fwd_1"], products["bwd_1"], products["bwd_0"]) == (2, 4 + 2, 3 + 2)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(nn.Dense(DIM)(jnp.sin(nn.Dense(DIM)(x))))


class LinenModel(nn.Module):
    way: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(STAGES):
            if self.way == "inside":
                x = linen.PipelineStage(nn.remat(LinenBlock)())(x)
            else:
                x = nn.remat(MarkedLinenBlock)()(x)
        return x


@linen.pipeline_stage
class MarkedLinenBlock(LinenBlock):
    pass


@pytest.mark.parametrize("way", [slow("inside"), "around"])
def test_linen_remat(way: str):
    model = LinenModel(way)
    params = model.init(jax.random.key(0), BATCH["x"][0])
    products = count(check(train_step(model.apply), params, BATCH, mesh_of(STAGES)).compiled, "dot_general")
    assert (products["fwd_1"], products["bwd_1"], products["bwd_0"]) == (2, 4 + 2, 3 + 2)
