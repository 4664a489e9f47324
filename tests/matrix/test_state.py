"""State that a model changes as it runs: statistics, counters, and the random numbers of dropout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxpp_flax import linen
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.treduce import Add, Concat, treduce
from jaxpp_flax.layers import PipelineStage
from jaxpp_flax.schedules import Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from tests.helpers import batch_of, tree_allclose
from tests.matrix.harness import check, mesh_of, run
from tests.trainers.models import Chain

STAGES, MICROBATCHES, ROWS, DIM = 2, 4, 16, 8
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)


class Calls(nnx.Variable):
    """A user's own kind of variable."""


class Block(nnx.Module):
    """Everything that a layer may change: running statistics, a counter, a moving average, random numbers."""

    def __init__(self, rngs: nnx.Rngs, features: tuple[str, ...]) -> None:
        # Without bias: in front of a BatchNorm its gradient is zero but for rounding, so no tolerance would be right.
        self.linear = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=0.5, rngs=rngs) if "norm" in features else None
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if "dropout" in features else None
        self.calls = Calls(jnp.int32(0)) if "counter" in features else None
        self.peak = Calls(jnp.zeros(DIM)) if "counter" in features else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.calls is not None and self.peak is not None:
            self.calls[...] += 1
            self.peak[...] = jnp.maximum(0.9 * self.peak[...], jax.lax.stop_gradient(jnp.abs(x).max(0)))
            x = x / (1 + 0.1 * self.peak[...])
        x = jnp.tanh(x)
        return x if self.dropout is None else self.dropout(x)


def nnx_step(graphdef: Any) -> Any:
    """The rest of the model's state is the loop's carry."""

    def loss(params: Any, rest: Any, b: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        value = jnp.mean((model(b["x"]) - b["y"]) ** 2)
        return value, nnx.split(model, nnx.Param, ...)[2]

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, rest = state

        def body(rest: Any, b: Any) -> Any:
            (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, b)
            return rest, (value, grads)

        rest, (losses, grads) = treduce(body, batch, schedule, init=rest)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest), (losses, grads)

    return step


def nnx_state(*features: str, layers: int = STAGES) -> tuple[Any, Any]:
    rngs = nnx.Rngs(0, dropout=1)
    model = Chain(PipelineStage(Block(rngs, features)) for _ in range(layers))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return graphdef, (params, rest)


def test_nnx_state():
    graphdef, state = nnx_state("norm", "counter", "dropout")
    ((_, rest), _), *_ = check(nnx_step(graphdef), state, BATCH, mesh_of(STAGES), ZeroBubble(STAGES)).history
    for rank, block in rest["blocks"].items():
        assert block["norm"]["mean"].get_value().mpmd_idxs == (rank,), "statistics live in their own stage"
    assert [int(b["calls"].get_value()) for b in rest["blocks"].values()] == [MICROBATCHES] * STAGES


def test_evaluation_uses_the_running_averages():
    """Train, then evaluate in the same step: the averages are read, and stay as they are."""
    graphdef, state = nnx_state("norm")
    train = nnx_step(graphdef)

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        (params, rest), _ = train(state, batch, schedule)

        def evaluate(b: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            model.eval()
            return jnp.mean((model(b["x"]) - b["y"]) ** 2)

        return (params, rest), treduce(evaluate, batch, None if schedule is None else GPipe(STAGES), operation=Concat())

    check(step, state, BATCH, mesh_of(STAGES))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(DIM, use_bias=False)(x))
        count = self.variable("counts", "calls", lambda: jnp.int32(0))
        if not self.is_initializing():
            count.value = count.value + 1
        return jnp.tanh(x)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(STAGES):
            x = linen.PipelineStage(LinenBlock())(x)
        return x


def linen_step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
    params, rest = state

    def loss(params: Any, rest: Any, b: Any) -> Any:
        x, rest = LinenModel().apply({"params": params, **rest}, b["x"], mutable=["batch_stats", "counts"])
        return jnp.mean((x - b["y"]) ** 2), rest

    def body(rest: Any, b: Any) -> Any:
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, b)
        return rest, (value, grads)

    rest, (losses, grads) = treduce(body, batch, schedule, init=rest)
    return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest), (losses, grads)


def test_linen_state():
    variables = LinenModel().init(jax.random.key(0), BATCH["x"][0])
    state = (variables["params"], {k: v for k, v in variables.items() if k != "params"})
    check(linen_step, state, BATCH, mesh_of(STAGES), Std1F1B(STAGES))


def masks_step(graphdef: Any) -> Any:
    """The masks themselves, as zeros of the activations."""

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, rest = state

        def body(rest: Any, b: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            x, zeros = b["x"], []
            for block in model.blocks:
                x = block(x)
                zeros.append(x == 0)
            return nnx.split(model, nnx.Param, ...)[2], (jnp.mean(x), zeros)

        rest, (_, zeros) = treduce(body, batch, schedule, operation=(Add, Concat()), init=rest)
        return (params, rest), zeros

    return step


def test_dropout_does_not_depend_on_the_partition():
    """Bit for bit the same masks for every number of stages and ranks and for every schedule; no two alike."""
    graphdef, state = nnx_state("dropout", layers=4)
    step = masks_step(graphdef)
    plain = run(jax.jit(step, static_argnums=2), state, BATCH, None, 2)
    expected = np.stack([[np.asarray(z) for z in zeros] for _, zeros in plain])  # (step, layer, microbatch, ...)
    flat = expected.reshape(-1, ROWS * DIM)
    assert len(np.unique(flat, axis=0)) == len(flat) == 2 * 4 * MICROBATCHES
    assert 0.2 < flat.mean() < 0.4
    for schedule in (Eager1F1B(2), Interleaved1F1B(4, 2)):
        cut = [0, 1, 2] if schedule.num_stages == 4 else [1]
        pipelined = mpmd_jit_with_loop(
            step, mesh_of(schedule.num_ranks), static_argnums=2, cut_policy=lambda marks, stages, cut=cut: cut
        )
        history = run(pipelined, state, BATCH, schedule, 2)
        tree_allclose(history, plain, rtol=0, atol=0)


def test_a_resumed_run_continues_the_masks():
    """The state after one step, fetched and put back, gives the second step's masks."""
    graphdef, state = nnx_state("dropout")
    step = mpmd_jit_with_loop(masks_step(graphdef), mesh_of(STAGES), static_argnums=2)
    (state, _), (_, expected) = run(step, state, BATCH, Std1F1B(STAGES), 2)

    def fetch(leaf: Any) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(np.asarray(jax.random.key_data(jnp.asarray(leaf))))
        return np.asarray(leaf)

    fresh = mpmd_jit_with_loop(masks_step(graphdef), mesh_of(STAGES), static_argnums=2)
    _, actual = fresh(jax.tree.map(fetch, state), BATCH, GPipe(STAGES))
    tree_allclose(actual, expected, rtol=0, atol=0)


def test_dropout_masks_agree_in_forward_and_backward():
    """With remat, too, where the backward draws the mask again."""
    graphdef, state = nnx_state("dropout")
    plain = nnx_step(graphdef)

    def loss(params: Any, rest: Any, b: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        x = nnx.remat(lambda m, x: m(x))(model, b["x"])
        return jnp.mean((x - b["y"]) ** 2), nnx.split(model, nnx.Param, ...)[2]

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, rest = state

        def body(rest: Any, b: Any) -> Any:
            (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, b)
            return rest, (value, grads)

        rest, (losses, grads) = treduce(body, batch, schedule, init=rest)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest), (losses, grads)

    check(step, state, BATCH, mesh_of(STAGES), Std1F1B(STAGES), reference=plain)
