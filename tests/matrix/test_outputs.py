"""What a step returns behaves like arrays, on the host and in plain JAX."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Std1F1B
from tests.matrix.harness import mesh_of


def loss_fn(p: Any, x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ p["first"]) @ p["tied"]
    return jnp.mean((mark_stage_end(x) @ p["tied"] @ p["last"]) ** 2)


def step(params: Any, count: Any, batch: Any) -> Any:
    losses, grads = treduce(lambda x: jax.value_and_grad(loss_fn)(params, x), batch, Std1F1B(2))
    key = jax.random.fold_in(jax.random.key(0), count)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses.mean(), count + 1, key


@pytest.fixture(scope="module")
def results() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("first", "tied", "last")}
    args = (params, 0, rng.normal(size=(2, 3, 4)).astype(np.float32))
    return mpmd_jit_with_loop(step, mesh_of(2))(*args), jax.jit(step)(*args)


NAMES = ["first", "tied", "last"]


def test_where_they_live(results: Any):
    params = results[0][0]
    assert {name: params[name].mpmd_idxs for name in NAMES} == {"first": (0,), "tied": (0, 1), "last": (1,)}


def test_scalars(results: Any):
    (_, loss, count, _), (_, expected, _, _) = results
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-6)
    assert int(count) == 1
    assert f"{loss:.3f}" == f"{float(expected):.3f}"
    assert bool(loss > 0)
    assert [10, 20][count] == 20, "usable as an index"
    assert loss.item() == float(loss)


@pytest.mark.parametrize("name", NAMES)
def test_arrays(results: Any, name: str):
    got, expected = results[0][0][name], np.asarray(results[1][0][name])
    close = lambda actual, wanted: np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-5)  # noqa: E731
    assert (got.shape, got.dtype, got.ndim) == ((4, 4), np.float32, 2)
    close(got, expected)
    close(got * 0.5, expected * 0.5)
    close(0.5 * got + got, expected * 1.5)
    close(np.float32(2) * got, expected * 2)
    close(np.ones((4, 4), np.float32) + got, expected + 1)
    close(got @ got.T, expected @ expected.T)
    close(got[1:, 0], expected[1:, 0])
    close(jnp.asarray(got), expected)
    close(jax.device_get(got), expected)
    close(jnp.tanh(got), np.tanh(expected))
    close(np.tanh(got), np.tanh(expected))
    close(jax.jit(lambda x: x * 2)(got), expected * 2)
    close(jax.device_put(got, jax.devices()[5]), expected)
    close(jnp.maximum(got, 0), np.maximum(expected, 0))
    close(got.mean(0), expected.mean(0))
    close(pickle.loads(pickle.dumps(got)), expected)
    assert isinstance(jax.device_get(got), np.ndarray)


def test_trees(results: Any):
    (params, *_), (expected, *_) = results
    sums = jax.tree.map(jnp.sum, params)
    for name in NAMES:
        np.testing.assert_allclose(float(sums[name]), float(expected[name].sum()), rtol=1e-5)
    fetched = jax.device_get(params)
    assert all(isinstance(x, np.ndarray) for x in fetched.values())
    jax.block_until_ready(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert all(not np.any(z) and z.shape == (4, 4) for z in zeros.values())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    assert "mpmd_idxs=(0, 1)" in repr(params["tied"])


@pytest.mark.parametrize("name", NAMES)
def test_plain_jit_on_one_rank(results: Any, name: str):
    """Arrays of one rank go straight into a plain jit; its gradient, too."""
    got, expected = results[0][0][name], results[1][0][name]
    value, gradient = jax.jit(jax.value_and_grad(lambda w: jnp.sum(jnp.sin(w))))(got)
    np.testing.assert_allclose(float(value), float(jnp.sum(jnp.sin(expected))), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient), np.cos(np.asarray(expected)), rtol=1e-5)


def test_evaluation_outside_of_the_pipeline(results: Any):
    """Fetched first: a plain jit runs on one set of devices, and the parameters live on several."""
    (params, *_), (expected, *_) = results
    x = np.ones((3, 4), np.float32)
    np.testing.assert_allclose(
        float(jax.jit(loss_fn)(jax.device_get(params), x)), float(loss_fn(expected, x)), rtol=1e-5
    )


def test_several_ranks_beside_one(results: Any):
    """Operators meet on a rank that both have; where there is none, they say what to do."""
    (params, *_), (expected, *_) = results
    np.testing.assert_allclose(
        jnp.where(params["tied"] > 0, params["tied"], 0), np.maximum(expected["tied"], 0), rtol=1e-5
    )
    for name in ("first", "last"):
        # Relative to the terms: they cancel in one entry, where float32 alone is wrong by more than 1e-5 of the sum.
        got, terms = np.asarray(params["tied"] @ params[name]), np.abs(expected["tied"]) @ np.abs(expected[name])
        assert np.all(np.abs(got - expected["tied"] @ expected[name]) <= 1e-6 * terms)
        beside = jax.device_get({"tied": params["tied"], name: params[name]})
        wanted = np.where(expected[name] > 0, expected["tied"], 0)
        np.testing.assert_allclose(jnp.where(beside[name] > 0, beside["tied"], 0), wanted, rtol=1e-5)
    with pytest.raises(ValueError, match=r"on rank 0 and float32\[4,4\] on rank 1: no rank has both.*device_get"):
        params["first"] + params["last"]


def test_keys(results: Any):
    key, expected = results[0][3], results[1][3]
    assert isinstance(key, MpmdArray)
    np.testing.assert_array_equal(jax.random.key_data(jnp.asarray(key)), jax.random.key_data(expected))
    assert float(jax.random.uniform(jnp.asarray(key))) == float(jax.random.uniform(expected))
