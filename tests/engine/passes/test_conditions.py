"""Conditions taken apart: the same values, without a condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.passes.conditions import is_condition, select_between_branches
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr

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
