"""Opened regions of `jax.checkpoint`: the same from both of JAX's forms, and each with a barrier."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax._compat_hijax import without_high_calls
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr, inside
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.regions import is_barrier, shielded

X, W = np.arange(6, dtype=np.float32).reshape(2, 3) / 7, np.ones((2, 3, 3), np.float32)
SWITCHES = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


@pytest.fixture(params=[False, True], ids=["by default", "with the switches"])
def switched(request: pytest.FixtureRequest):
    """JAX's other implementations, as far as this JAX has them."""
    before = {name: getattr(jax.config, name) for name in SWITCHES if hasattr(jax.config, name)}
    for name in before:
        jax.config.update(name, request.param)
    yield request.param
    for name, value in before.items():
        jax.config.update(name, value)


def opened(fun: Any, *args: Any) -> Graph:
    graph, consts = from_jaxpr(jax.make_jaxpr(fun)(*args))
    assert not consts
    return inline(graph, flatten=True, remat=True)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(jnp.sin(x @ w))


def regions(w: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
    """A region for each layer."""
    block = jax.checkpoint(layer, **options)
    for of in w:
        x = block(of, x)
    return x.sum()


def around(w: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
    """One region with marks, which divide it."""

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        for of in w:
            x = mark_stage_end(layer(of, x))
        return x.sum()

    return jax.checkpoint(model, **options)(w, x)


@pytest.mark.parametrize("fun", [regions, around])
def test_each_region_waits_for_its_cotangent(fun: Any, switched: bool):
    graph = opened(jax.grad(fun), W, X)
    assert not any(is_barrier(e) for e in graph.equations)
    result = shielded(graph)
    result.verify()
    np.testing.assert_allclose(result.run(W, X)[0], jax.grad(regions)(W, X), rtol=1e-6)
    barriers = [e for e in result.equations if is_barrier(e)]
    assert len(barriers) == 2
    makers = [{e: n for n, e in enumerate(result.equations)}[result.producer[v]] for b in barriers[1:] for v in b.inputs
              if v in result.producer]  # fmt: skip
    assert max(makers) > result.equations.index(barriers[0]), "recomputed after the second layer's backward"
    late = [n for n, e in enumerate(result.equations) if e.late]
    assert min(late) > result.equations.index(barriers[0])


def test_constants_stay_outside_of_barriers():
    """XLA for GPUs writes what enters a barrier: the zeros of a mask's gradient are as large as the scores."""

    def masked(w: jax.Array, x: jax.Array) -> jax.Array:
        scores = jnp.where(jnp.tri(2, 3, dtype=bool), jnp.sin(x @ w), -1e9)
        return jax.nn.softmax(scores)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.checkpoint(masked)(w[0], x) * x).sum()

    graph = shielded(opened(jax.grad(loss), W, X))
    (barrier,) = [e for e in graph.equations if is_barrier(e)]
    fed = set(graph.inputs)
    for equation in graph.equations:
        if not fed.isdisjoint(equation.inputs):
            fed.update(equation.outputs)
    assert fed.issuperset(barrier.inputs)
    np.testing.assert_allclose(graph.run(W, X)[0], jax.grad(loss)(W, X), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 forgets prevent_cse= with JAX_REMAT3")
def test_a_region_without_a_barrier_stays_so(switched: bool):
    graph = opened(jax.grad(lambda w, x: regions(w, x, prevent_cse=False)), W, X)
    assert not any(is_barrier(e) for e in shielded(graph).equations)
    assert any(is_barrier(e) for e in shielded(graph, always=True).equations)


def test_the_bodies_of_scans_keep_barriers(switched: bool):
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, w)[0].sum()

    graph, _ = from_jaxpr(jax.make_jaxpr(jax.grad(loss))(W, X))
    kinds = [eqn.primitive.name for e in graph.equations for eqn in inside(e.params)]
    assert "call_hi_primitive" not in kinds
    np.testing.assert_allclose(graph.run(W, X)[0], jax.grad(loss)(W, X), rtol=1e-6)


def custom_square() -> Any:
    square = jax.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    return square


CALLS = {
    "checkpoint": jax.checkpoint(jnp.sin),
    "custom_vjp": custom_square(),
    "custom_jvp": jax.nn.relu,
    "mapped": jax.vmap(custom_square()),
    "nested": jax.checkpoint(lambda x: jax.nn.relu(jax.checkpoint(jnp.sin)(x))),
}
PLACES = {
    "top": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, jnp.cos, x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_no_high_level_call_is_left(call: str, place: str, switched: bool):
    fun = PLACES[place](CALLS[call])
    jaxpr = jax.make_jaxpr(fun)(X)
    graph, _ = from_jaxpr(jaxpr)
    assert (without_high_calls(jaxpr) is jaxpr) or switched
    assert "call_hi_primitive" not in {
        *(e.name for e in graph.equations), *(eqn.primitive.name for e in graph.equations for eqn in inside(e.params))
    }  # fmt: skip
    np.testing.assert_allclose(graph.run(X)[0], fun(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(graph.run)(X)[0], fun(X), rtol=1e-6)
