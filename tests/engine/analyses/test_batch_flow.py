"""The examples of a batch, and sums over them, followed through graphs, scans and shard_maps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.analyses.batch_flow import propagate
from jaxpp_flax.engine.analyses.inner_bodies import open_scan
from jaxpp_flax.engine.passes.loop.defer_reductions import defer_reductions
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, from_jaxpr
from jaxpp_flax.engine.tracing.treduce import AddOp, MaxOp
from tests.engine.toys import indexless

ROWS, DIM, LENGTH = 6, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, DIM)).astype(np.float32)
STACK = RNG.normal(size=(LENGTH, DIM, DIM)).astype(np.float32)
SHARED = RNG.normal(size=(DIM, DIM)).astype(np.float32)


def graph_of(fun: Any, *args: Any) -> Graph:
    graph, consts = from_jaxpr(jax.make_jaxpr(fun)(*args))
    assert not consts
    return graph


def scanned(x: jax.Array, stack: jax.Array, shared: jax.Array) -> Any:
    """Constants, a carry of two leaves, slices in and out, backwards."""

    def body(carry: Any, w: jax.Array) -> Any:
        x, n = carry
        x = jax.jit(jnp.tanh)(x @ w @ shared)
        return (x, n + 1), (x.sum(0), n)

    return jax.lax.scan(body, (x, 0), stack, reverse=True)


def scan_in(graph: Graph) -> Equation:
    (scan,) = [e for e in graph.equations if e.name == "scan"]
    return scan


def test_the_parts_of_a_scan():
    scan = open_scan(scan_in(graph_of(scanned, X, STACK, SHARED)))
    assert (scan.num_consts, scan.num_carry, len(scan.body.inputs), len(scan.body.outputs)) == (1, 2, 4, 4)
    assert [v.aval.shape for v in scan.carry_in] == [(ROWS, DIM), ()]
    assert "jit" not in [e.name for e in scan.body.equations]


def zeros_first(x: jax.Array, stack: jax.Array, shared: jax.Array) -> Any:
    """The state begins without a batch; what is scanned over is the batch's other dimension."""
    return jax.lax.scan(lambda h, column: (jnp.tanh(h @ shared + column[:, None]), h), jnp.zeros((ROWS, DIM)), x.T)


def mixed_up(x: jax.Array, stack: jax.Array, shared: jax.Array) -> Any:
    """The carry changes places with its transpose: no dimension of it is the batch's throughout."""
    return jax.lax.scan(lambda x, _: (x.T, x), x @ x.T, None, length=2)


@pytest.mark.parametrize(
    ("fun", "dims"), [(scanned, [0, None, None, None]), (zeros_first, [0, 1]), (mixed_up, [None, None])]
)
def test_the_batch_dimension(fun: Any, dims: list[int | None]):
    graph = graph_of(fun, X, STACK, SHARED)
    found = propagate(graph.equations, {graph.inputs[0]: (0, "data")}, lambda axes: 2)
    outputs = [found.get(a, (None,))[0] for a in graph.outputs if isinstance(a, Value)]
    assert outputs == dims


def parts_of(graph: Graph, known: Any, *args: Any) -> list[Any]:
    """The parts of all results, which must all wait."""
    deferred = defer_reductions(indexless(graph, [AddOp()] * len(graph.outputs)), known, lambda axes: 2)
    deferred.body.verify()
    assert set(deferred.axes) == {"data"}
    return deferred.body.run(*args, 0)


@pytest.mark.parametrize("uses", ["once", "twice"])
def test_gradients_of_a_scan_wait_apart(uses: str):
    """Both shards' sums of the stacked and of the shared weight; added up they are the gradients."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> Any:
            x = jnp.tanh(x @ w @ weights[1])
            return (jnp.sin(x @ weights[1]) if uses == "twice" else x), None

        return jnp.sum(jax.lax.scan(body, x, weights[0])[0] ** 2)

    graph = graph_of(jax.grad(loss), (STACK, SHARED), X)
    known = {graph.inputs[2]: (0, "data")}
    parts = parts_of(graph, known, STACK, SHARED, X)
    assert [p.shape for p in parts] == [(2, *STACK.shape), (2, *SHARED.shape)]
    for shard, half in enumerate((X[: ROWS // 2], X[ROWS // 2 :])):
        for part, wanted in zip(parts, jax.grad(loss)((STACK, SHARED), half), strict=True):
            np.testing.assert_allclose(part[shard], wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


def test_a_gradient_that_is_used_in_the_scan_does_not_wait():
    """Its running sum feeds the next step: halves of it would give something else."""

    def fun(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, _: (total + x.T @ (x * total.sum()), None), jnp.zeros((DIM, DIM)), None, 3)[0]

    graph = graph_of(fun, X)
    body = indexless(graph, [AddOp()])
    deferred = defer_reductions(body, {graph.inputs[0]: (0, "data")}, lambda axes: 2)
    assert deferred.axes == (None,)
    assert deferred.body is body


def two_readers(x: jax.Array) -> Any:
    """One sum, read by two linear operations."""
    total = x.T @ jnp.tanh(x)
    return total * 2, total.T


def by_a_count(x: jax.Array) -> Any:
    """A sum that is divided by another one, which is whole."""
    return (x.T @ x / jnp.maximum(jnp.sum(x[:, 0] > 0), 1),)


def decaying(x: jax.Array) -> Any:
    """A carry that is scaled in each step; the sum of another scan is where it begins."""
    total, _ = jax.lax.scan(lambda t, s: (t + x.T @ (x * s), None), jnp.zeros((DIM, DIM)), jnp.arange(3.0))
    return (jax.lax.scan(lambda t, s: (0.5 * t - x.T @ (s + x), None), total, jnp.arange(3.0))[0],)


def printed(x: jax.Array) -> Any:
    jax.debug.callback(lambda x: None, x)
    return (x.sum(0),)


@pytest.mark.parametrize("fun", [two_readers, by_a_count, decaying, printed])
def test_parts_add_up(fun: Any):
    graph = graph_of(fun, X)
    graph = inline(graph, flatten=True)
    for parts, wanted in zip(parts_of(graph, {graph.inputs[0]: (0, "data")}, X), fun(X), strict=True):
        assert parts.shape == (2, *wanted.shape)
        np.testing.assert_allclose(parts.sum(0), wanted, rtol=1e-5, atol=1e-6)


def test_a_sum_that_anything_needs_whole_does_not_wait():
    """One reader is not linear, so the other one gets the whole sum too."""

    def fun(x: jax.Array) -> Any:
        total = x.T @ x
        again, stacked = jax.lax.scan(lambda t, _: (t + x.T @ x, t.sum()), jnp.zeros((DIM, DIM)), None, 2)
        return total * 2, jnp.tanh(total), again, stacked

    graph = graph_of(fun, X)
    body = indexless(graph, [AddOp()] * 2 + [MaxOp()] + [AddOp()])
    assert set(defer_reductions(body, {graph.inputs[0]: (0, "data")}, lambda axes: 2).axes) == {None}
