"""Conditions taken apart: the same values, without a condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.conditions import is_condition, select_between_branches
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, tree_allclose

A, B = np.arange(4, dtype=np.float32), np.arange(6, dtype=np.float32) - 2


def graph_of(fun: Any, *args: Any) -> Graph:
    graph, consts = from_jaxpr(jax.make_jaxpr(fun)(*args))
    assert not consts
    return graph


def apart(flag: Any, a: jax.Array, b: jax.Array) -> Any:
    """Two arrays that never meet; a counter both branches make."""
    return jax.lax.cond(flag, lambda: (a + 1, b * 2, 1), lambda: (a, b - 3, 0))


def together(flag: Any, a: jax.Array, b: jax.Array) -> Any:
    """One branch scales each array by the norm of both."""

    def clipped() -> Any:
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        return a / norm, b / norm

    return jax.lax.cond(flag, clipped, lambda: (a, b))


def passed_on(flag: Any, a: jax.Array, b: jax.Array) -> Any:
    """JAX itself hands on what both branches return unchanged: one output is left, in whose two branches one is."""
    return jax.lax.cond(flag, lambda: (a, a, b), lambda: (a, a * 2, b))


def switched(flag: Any, a: jax.Array, b: jax.Array) -> Any:
    return jax.lax.switch(flag, [lambda: (a, b), lambda: (a + 1, b + 1), lambda: (a * 2, b)])


def conditions(graph: Graph) -> list[Any]:
    return [e for e in graph.equations if is_condition(e)]


def changed(graph: Graph, change: Any) -> Graph:
    """The graph with other equations for its condition."""
    parts = [part for e in graph.equations for part in (change(e) if is_condition(e) else [e])]
    return replace(graph, equations=tuple(parts))


def through_scalars(flag: Any, a: jax.Array, b: jax.Array) -> Any:
    """Two arrays that meet in a number, which scales one of them; a third output stays apart."""
    return jax.lax.cond(flag, lambda: (a * jnp.sum(b), b + 1, 3), lambda: (a, b, 4))


@pytest.mark.parametrize("fun", [apart, together, passed_on, switched, through_scalars])
def test_selection(fun: Any):
    """No condition is left; both branches are computed and one is taken, by the very same operations."""
    graph = graph_of(fun, 1, A, B)
    flat = changed(graph, select_between_branches)
    flat.verify()
    assert not conditions(flat)
    for flag in range(3 if fun is switched else 2):
        for got, wanted in zip(flat.run(np.int32(flag), A, B), jax.tree.leaves(fun(flag, A, B)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)  # an eager sum beside a compiled one
            assert got.dtype == wanted.dtype


def test_a_condition_with_side_effects_is_left_alone():
    def printing(flag: Any, a: jax.Array) -> jax.Array:
        return jax.lax.cond(flag, lambda: jax.debug.print("taken") or a, lambda: a * 2)

    graph = graph_of(printing, True, A)
    assert [e.name for e in graph.equations if e.name == "cond"] == ["cond"]
    assert not conditions(graph)


def grown(x: jax.Array, rate: Any) -> jax.Array:
    """Work that ends only if `rate` is above 0."""
    total = jax.lax.while_loop(lambda total: total < 1, lambda total: total + rate, rate * 0)
    return x * total


def checked(x: jax.Array, rate: Any) -> jax.Array:
    """Work of the host that fails unless `rate` is above 0."""

    def on_host(x: np.ndarray, rate: np.ndarray) -> np.ndarray:
        if not rate > 0:
            raise ValueError("a branch that is not taken has run")
        return np.asarray(x * rate)

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, rate)


@jax.custom_jvp
def custom(x: jax.Array, rate: Any) -> jax.Array:
    return grown(x, rate)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))


def scanned(x: jax.Array, rate: Any) -> jax.Array:
    return jax.lax.scan(lambda x, _: (grown(x, rate), None), x, length=2)[0]


def in_a_condition(x: jax.Array, rate: Any) -> jax.Array:
    return jax.lax.cond(x.sum() > -1e9, lambda: grown(x, rate) + checked(x, rate), lambda: grown(x, rate))


def keys(x: jax.Array, rate: Any) -> jax.Array:
    """The loop's results are a key and a flag."""
    first = (jax.random.key(0), jnp.bool_(False), 0.0)
    loop = lambda it: (jax.random.fold_in(it[0], 1), ~it[1], it[2] + rate)  # noqa: E731
    key, flag, _ = jax.lax.while_loop(lambda it: it[2] < 1, loop, first)
    return x + jax.random.uniform(key) + flag


UNSAFE = [
    grown, checked, custom, scanned, in_a_condition, keys, jax.jit(grown), jax.checkpoint(grown),  # type: ignore[list-item]
    jax.vmap(grown, (0, None)),
]  # fmt: skip


@pytest.mark.parametrize("unsafe", UNSAFE, ids=range(len(UNSAFE)))
def test_what_may_not_end_or_fail_runs_only_if_its_branch_is_taken(unsafe: Any):
    def fun(index: Any, a: Any, b: Any) -> Any:
        rate = jnp.where(index == 1, 0.5, 0.0)
        inner = lambda: (unsafe(a, rate) + 1, unsafe(b, rate) - 1)  # noqa: E731
        branches = [lambda: (a, b), inner, lambda: (a + 1, b + 1)]
        return jax.lax.cond(index < 3, lambda: jax.lax.switch(index, branches), lambda: (a - 1, b))

    flat = changed(graph_of(fun, 1, A, B), select_between_branches)
    assert not conditions(flat), "no guard is taken apart again"
    assert sum(e.name == "cond" for e in flat.equations) >= 2
    run = jax.jit(flat.run)
    for index in range(4):
        for got, wanted in zip(run(np.int32(index), A, B), jax.jit(fun)(index, A, B), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_an_update_under_a_guard_on_two_ranks():
    """The callback fails if it runs against the guard; the loop would run for ever."""

    def step(params: Any, guard: Any, batch: Any, schedule: Any) -> Any:
        _, grads = gradients(schedule)(params, batch)
        rate = jnp.where(guard, 0.5, 0.0)
        update = lambda p, g: p - grown(checked(g, rate), rate)  # noqa: E731
        return jax.lax.cond(guard, lambda: jax.tree.map(update, params, grads), lambda: params)

    pipelined = mpmd_jit_with_loop(step, mesh_of(2), static_argnums=3)
    plain = jax.jit(step, static_argnums=3)
    for guard in (True, False):
        found = pipelined(chain(2), guard, batch_of(2), Std1F1B(2))
        assert [leaf.mpmd_idxs for leaf in jax.tree.leaves(found)] == [(0,), (0,), (1,), (1,)]
        tree_allclose(jax.tree.map(np.asarray, found), plain(chain(2), guard, batch_of(2), None), rtol=1e-5)
