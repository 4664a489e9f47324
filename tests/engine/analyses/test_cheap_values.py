"""The least values to keep: minimum cuts against brute force, and the values of an ordinary layer."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.engine.analyses.cheap_values import cheap_cut, is_cheap, nearest_cut
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr

NODES = range(6)


@st.composite
def networks(draw: st.DrawFn) -> tuple[dict[int, list[int]], dict[int, int], list[int], list[int]]:
    """Edges from smaller to larger numbers, costs, sources and sinks."""
    pairs = draw(st.sets(st.sampled_from([*itertools.combinations(NODES, 2)])))
    edges = {n: sorted(b for a, b in pairs if a == n) for n in NODES}
    some = st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True)
    return edges, {n: draw(st.integers(0, 4)) for n in NODES}, draw(some), draw(some)


def leads_past(cut: set[int], edges: dict[int, list[int]], sources: list[int], sinks: list[int]) -> bool:
    reached, stack = set[int](), [n for n in sources if n not in cut]
    while stack:
        node = stack.pop()
        reached.add(node)
        stack += [n for n in edges[node] if n not in cut and n not in reached]
    return not reached.isdisjoint(sinks)


@given(networks())
def test_the_cut_is_the_cheapest_and_the_nearest_to_the_sinks(network: Any):
    edges, cost, sources, sinks = network
    found = nearest_cut(NODES, edges, cost, sources, sinks)
    assert not leads_past(found, edges, sources, sinks)
    cuts = [set(c) for size in range(7) for c in itertools.combinations(NODES, size)]
    cuts = [cut for cut in cuts if not leads_past(cut, edges, sources, sinks)]
    least = min(sum(cost[n] for n in cut) for cut in cuts)
    assert sum(cost[n] for n in found) == least
    reached = {n for n in NODES if leads_past(set(), edges, sources, [n])}
    assert found <= reached
    # Every other least cut leaves at least as much to compute.
    for other in (cut for cut in cuts if sum(cost[n] for n in cut) == least):
        assert behind(found, edges, sinks) & reached <= behind(other, edges, sinks) | other


def behind(cut: set[int], edges: dict[int, list[int]], sinks: list[int]) -> set[int]:
    """The nodes that lead to a sink without the cut."""
    return {n for n in NODES if n not in cut and leads_past(cut, edges, [n], sinks)}


@pytest.mark.parametrize(
    ("function", "cheap"),
    [
        (lambda x: jax.nn.gelu(x), True),
        (lambda x: jax.nn.softmax(x), True),
        (lambda x: (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-6), True),
        (lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), True),
        (lambda x: x @ x, False),
        (lambda x: jax.jit(lambda y: jnp.sin(y @ y))(x), False),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[1], False),
        (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), False),
        (lambda x: jnp.sort(x), False),
        (lambda x: jax.pure_callback(lambda y: y, x, x), False),
    ],
    ids=["gelu", "softmax", "norm", "dropout", "product", "inner", "scan", "cond", "sort", "callback"],
)
def test_cheap_and_costly_operations(function: Any, cheap: bool):
    equations = jax.make_jaxpr(function)(jnp.ones((4, 4))).jaxpr.eqns
    assert all(map(is_cheap, equations)) == cheap


ROWS, WIDTH = 16, 8


def layer(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(y @ w1) @ w2


def residuals_of_layer() -> tuple[Graph, list[Value], list[Any]]:
    """The forward of a layer with what its gradient reads as results."""
    args = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))
    residuals = lambda *args: jax.tree.leaves(jax.vjp(layer, *args)[1])  # noqa: E731
    graph = inline(from_jaxpr(jax.make_jaxpr(residuals)(*args))[0], flatten=True)
    made = {v for e in graph.equations for v in e.outputs}
    rng = np.random.default_rng(0)
    return graph, [v for v in graph.outputs if v in made], [rng.normal(size=a.shape).astype(np.float32) for a in args]


def test_a_layer_keeps_its_input_and_the_result_of_its_first_product():
    graph, wanted, args = residuals_of_layer()
    x, w1, w2 = graph.inputs
    cut = cheap_cut(graph, wanted, free=(w1, w2), held=())
    assert cut.kept[0] is x
    large = [v for v in cut.kept if v.aval.size > ROWS]
    assert [v.aval.shape for v in large] == [(ROWS, WIDTH), (ROWS, 4 * WIDTH)]
    assert sum(v.nbytes for v in cut.kept) < 0.5 * sum(v.nbytes for v in set(wanted))
    assert not {e.name for e in cut.equations} & {"dot_general"}
    # The equations compute the wanted values from what is kept.
    names = dict(zip(graph.inputs, args, strict=True))
    known = Graph(graph.inputs, (*cut.kept, *wanted), graph.equations).run(*names.values())
    kept, expected = known[: len(cut.kept)], known[len(cut.kept) :]
    again = Graph((w1, w2, *cut.kept), tuple(wanted), cut.equations)
    again.verify()
    for one, other in zip(again.run(names[w1], names[w2], *kept), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_held_anyway_costs_nothing():
    graph, wanted, _ = residuals_of_layer()
    product = next(e.outputs[0] for e in graph.equations if e.name == "dot_general")
    cut = cheap_cut(graph, wanted, free=graph.inputs, held=(product,))
    assert all(v is product or v.aval.size <= ROWS for v in cut.kept)


def test_a_small_value_is_kept_beside_large_ones():
    def norm(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = x.mean()
        return mean, x - mean

    graph = inline(from_jaxpr(jax.make_jaxpr(norm)(jnp.ones((ROWS, 64))))[0], flatten=True)
    cut = cheap_cut(graph, list(graph.outputs), free=graph.inputs, held=())
    assert cut.kept == ()  # nothing is to be kept: all of it follows from the input
    (x,) = graph.inputs
    held = cheap_cut(graph, list(graph.outputs), free=(), held=(x,))
    assert held.kept == (x, graph.outputs[0])
    assert [e.name for e in held.equations] == ["sub"]
