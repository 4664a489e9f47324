"""Inlining: every marker at the top, nothing else changed; recomputed markers give way to the original ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.tracing.inline import MarkerPlacementError, inline, is_recomputation
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr
from jaxpp_flax.engine.tracing.markers import BACKWARD, FORWARD, mark_stage_end, marker_p
from jaxpp_flax.engine.tracing.treduce import Add, treduce, treduce_p

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
W = np.ones((3, 3), np.float32)


def inlined(fun: Callable[..., Any], *args: Any, flatten: bool = False) -> Graph:
    """Inline and check that the function is the same."""
    graph, consts = from_jaxpr(jax.make_jaxpr(fun)(*args))
    result = inline(graph, flatten=flatten)
    result.verify()
    operands = [*consts, *jax.tree.leaves(args)]
    for actual, expected in zip(result.run(*operands), graph.run(*operands), strict=True):
        np.testing.assert_array_equal(actual, expected)
    return result


def names(graph: Graph) -> list[str]:
    return [e.name for e in graph.equations]


def directions(graph: Graph) -> list[str]:
    return [e.params["direction"] for e in graph.equations if e.primitive is marker_p]


@jax.custom_vjp
def custom(x: jax.Array) -> jax.Array:
    return mark_stage_end(jnp.sin(x))


custom.defvjp(lambda x: (custom(x), x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_jvp
def custom_forward(x: jax.Array) -> jax.Array:
    return mark_stage_end(jnp.sin(x))


custom_forward.defjvp(lambda p, t: (custom_forward(p[0]), jnp.cos(p[0]) * t[0]))


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, lambda f: jax.jit(jax.jit(f)), jax.checkpoint, lambda f: jax.vmap(f), lambda f: f],
    ids=["jit", "nested", "remat", "vmap", "plain"],
)
def test_calls_that_hide_a_marker(wrap: Callable[..., Any]):
    marked = wrap(lambda x: mark_stage_end(jnp.sin(x)))
    graph = inlined(lambda x: jnp.cos(marked(x)), X)
    assert directions(graph) == [FORWARD]
    graph = inlined(jax.grad(lambda x: jnp.cos(marked(x)).sum()), X)
    assert directions(graph) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("fun", [custom, custom_forward], ids=["vjp", "jvp"])
def test_custom_derivatives(fun: Callable[..., Any]):
    assert names(inlined(lambda x: fun(x) + 1, X)) == ["sin", "stage_marker", "add"]
    # Without a marker too: their rules have no use any more, and would hide that two stages are alike.
    assert not [n for n in names(inlined(lambda x: jax.nn.relu(x), X)) if n.startswith("custom")]


def test_an_inlined_equation_stands_in_the_scopes_of_its_calls():
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jax.named_call(jnp.sin, name="inner")(x))(x)

    (sine,) = inlined(fun, X, flatten=True).equations
    assert str(sine.source.name_stack) == "outer/inner"


def test_what_hides_nothing_stays_opaque():
    def fun(x: jax.Array) -> jax.Array:
        x = jax.jit(lambda y: jnp.sin(y) * 2)(x)
        x = mark_stage_end(x)
        return jax.lax.scan(lambda c, row: (c + row, None), x[0], x)[0]

    graph = inlined(fun, X)
    assert {"scan", "stage_marker"} < set(names(graph))
    assert names(graph)[0] in ("jit", "pjit")
    assert "sin" in names(inlined(fun, X, flatten=True))
    assert "scan" in names(inlined(fun, X, flatten=True))


def test_a_loop_stands_at_the_top():
    def step(x: jax.Array) -> jax.Array:
        return treduce(lambda row: mark_stage_end(row).sum(), x, operation=Add)

    graph = inlined(jax.jit(step), X, flatten=True)
    assert any(e.primitive is treduce_p for e in graph.equations)


def test_a_recomputed_marker_gives_way_to_the_original():
    """Two stages in one region: the second is recomputed from what left the first, which is not recomputed for it."""

    @jax.checkpoint
    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        x = mark_stage_end(jnp.tanh(x @ w))
        return jnp.tanh(x @ w).sum()

    graph = inlined(jax.grad(both), W, X)
    assert directions(graph) == [FORWARD, BACKWARD]
    forward, backward = [e for e in graph.equations if e.primitive is marker_p]
    late = [e for e in graph.equations if e.late]
    assert not any(e.transposed for e in late)
    assert any(forward.outputs[0] in e.inputs for e in late), "the second stage recomputes from the original marker"
    assert backward.transposed
    assert not any(is_recomputation(e) for e in graph.equations)


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False) and jax.__version_info__ < (0, 11), reason="JAX ignores this policy"
)
def test_a_region_that_saves_everything_recomputes_nothing():
    """Nothing in it has JAX's name of recomputed work: what reads a cotangent is backward work, not recomputation."""
    saving = partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    both = saving(lambda w, x: jnp.tanh(mark_stage_end(jnp.tanh(x @ w)) @ w))
    graph = inlined(jax.grad(lambda w, x: both(w, x).sum()), W, X)
    assert directions(graph) == [FORWARD, BACKWARD]
    backward = names(graph).index("stage_marker", names(graph).index("stage_marker") + 1)
    assert [e.name for e in graph.equations[backward:] if not e.transposed] == []
    assert [e.name for e in graph.equations if e.late] == []


def test_a_cached_call_repeats_an_identifier():
    """Regions are recomputed in reverse order, so each takes the last original that is still unclaimed."""
    block = jax.checkpoint(jax.jit(lambda w, x: mark_stage_end(jnp.tanh(x @ w))))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = block(w, x)
        return (x @ w).sum()

    graph = inlined(jax.grad(loss), W, X)
    assert directions(graph) == [FORWARD] * 3 + [BACKWARD] * 3
    assert len({e.params["identifier"] for e in graph.equations if e.primitive is marker_p}) == 1


def test_dead_work_is_dropped():
    graph = inlined(lambda x: (jax.jit(lambda y: (mark_stage_end(y), jnp.sin(y)))(x)[0],), X)
    assert "sin" not in names(graph)


@pytest.mark.parametrize(
    ("fun", "says"),
    [
        (lambda x: jax.lax.map(mark_stage_end, x), "`scan`.*Give each stage a scan"),
        (lambda x: jax.lax.fori_loop(0, x.astype(int)[0, 0], lambda _, y: mark_stage_end(y), x), "`while`.*out of the"),
        (lambda x: jax.lax.cond(x[0, 0] > 0, mark_stage_end, lambda y: y, x), "`cond`.*in front of or behind"),
        (lambda x: jax.jvp(mark_stage_end, (x,), (x,))[1], "forward mode.*reverse mode"),
    ],
    ids=["scan", "while", "cond", "jvp"],
)
def test_a_marker_where_no_cut_can_be(fun: Callable[..., Any], says: str):
    graph, _ = from_jaxpr(jax.make_jaxpr(jax.jit(fun))(X))
    with pytest.raises(MarkerPlacementError, match=says):
        inline(graph)
