"""The representation: conversion from jaxprs, evaluation, verification, pruning, text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.tracing.ir import (
    Constant,
    Graph,
    Value,
    VerificationError,
    bodies,
    emit,
    from_jaxpr,
    plain_literal,
    prune,
    values,
)


def graph_of(fun: Any, *args: Any) -> Graph:
    graph, consts = from_jaxpr(jax.make_jaxpr(fun)(*args))
    assert not consts
    graph.verify()
    return graph


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def rich(x: jax.Array) -> Any:
    """A call, control flow, several results of one equation, a literal, an unused value."""
    unused = x * 17.0
    del unused
    y = jax.jit(lambda z: z + 1.0)(x)
    y, total = jax.lax.scan(lambda c, row: (c + row.sum(), c), jnp.float32(0), y)
    return jnp.where(y > 3, total, -total), y, 2.0


def test_a_graph_computes_what_its_jaxpr_does():
    graph = graph_of(rich, X)
    for actual, expected in zip(graph.run(X), rich(X), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for actual, expected in zip(jax.jit(graph.run)(X), rich(X), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_captured_arrays_become_leading_inputs():
    table = jnp.arange(1000.0)
    graph, consts = from_jaxpr(jax.make_jaxpr(lambda i: table[i])(0))
    assert [c.shape for c in consts] == [(1000,)]
    assert [v.aval.shape for v in graph.inputs] == [(1000,), ()]
    assert graph.run(*consts, 7) == [7.0]


def test_operands_are_substituted():
    x = Value(jax.typeof(X))
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x, y: x + y)(X, 1.0), [x, Constant(2.0, jax.typeof(2.0))])
    assert graph.inputs == (x,)
    np.testing.assert_array_equal(graph.run(X)[0], X + 2)


def test_equations_know_their_line_and_their_direction():
    graph = graph_of(jax.grad(lambda x: jnp.sin(x).sum()), X)  # this very line
    line = next(
        n for n, t in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1) if "# this very" in t
    )
    (sine,) = [e for e in graph.equations if e.name == "cos"]
    assert f"{Path(__file__).name}:{line}" in sine.where
    assert not sine.transposed
    assert any(e.transposed for e in graph.equations)
    assert replace(sine, source=None).where == "unknown"


def test_sizes():
    assert Value(jax.typeof(X)).nbytes == 24
    assert Value(jax.typeof(jnp.zeros((3, 5), jnp.bfloat16))).nbytes == 30
    assert Constant(1.0, jax.typeof(1.0)).nbytes == 0


def test_prune_drops_what_has_no_effect():
    graph = graph_of(rich, X)
    pruned = prune(graph)
    assert len(pruned.equations) < len(graph.equations)
    for actual, expected in zip(pruned.run(X), graph.run(X), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert prune(pruned).equations == pruned.equations


def test_prune_keeps_side_effects():
    def loud(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum())
        return x

    pruned = prune(graph_of(loud, X)).equations
    assert pruned[0].name == "reduce_sum"
    assert pruned[-1].effects


def test_text():
    text = graph_of(lambda x: jax.jit(lambda y: y * 2.0, inline=False)(x) + 1.0, X).as_text()
    lines = text.splitlines()
    assert lines[0] == "inputs  %0:float32[2,3]"
    assert lines[1].startswith("  %1:float32[2,3] = jit [")
    assert lines[2].startswith("  %2:float32[2,3] = add(%1, 1.0")
    assert lines[3] == "outputs %2"


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda g: replace(g, equations=g.equations[1:]), "equation 0 .* reads what no earlier step makes"),
        (lambda g: replace(g, equations=g.equations[::-1]), r"equation 0 \(cos\) reads what no earlier step makes"),
        (lambda g: replace(g, equations=(*g.equations, g.equations[0])), "defines a value again"),
        (lambda g: replace(g, equations=g.equations[:1]), "an output is undefined"),
        (lambda g: replace(g, inputs=g.inputs * 2), "lists one input twice"),
    ],
    ids=["missing", "order", "twice", "output", "inputs"],
)
def test_verify_finds(broken: Any, says: str):
    graph = graph_of(lambda x: jnp.cos(jnp.sin(x)), X)
    with pytest.raises(VerificationError, match=says):
        broken(graph).verify()


def test_literals_forget_the_mesh_of_their_trace():
    """A literal that JAX keeps as an array of its own has a type with a mesh; on a submesh that type would not fit."""
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(lambda x: (x + np.uint32(7), x * 2))(np.uint32(1))
    graph, _ = from_jaxpr(jaxpr)
    literals = [a.value for e in graph.equations for a in e.inputs if isinstance(a, Constant)]
    assert len(literals) == 2
    for literal in literals:
        assert jax.typeof(literal).sharding.mesh.empty
    assert [int(x) for x in graph.run(np.uint32(3))] == [10, 6]


def test_weak_literals_stay_weak():
    assert plain_literal(jnp.asarray(2.0), jax.typeof(2.0)) == 2.0
    assert isinstance(plain_literal(jnp.asarray(2.0), jax.typeof(2.0)), float)
    assert plain_literal(jnp.float32(2.0), jax.typeof(np.float32(2.0))).dtype == np.float32


def test_emitted_equations_are_those_of_a_function_applied_to_atoms():
    a, b = (Value(jax.typeof(jnp.ones(3))) for _ in range(2))
    two = Constant(2.0, jax.typeof(jnp.float32(2)))
    captured = np.arange(3, dtype=np.float32)
    equations, (total, same) = emit(lambda x, k: (x * k + captured, x), [a, two], [b, None])
    assert total is b
    assert same is not a  # a result that comes out as it went in is copied to a value of its own
    assert values([a, two, b]) == [a, b]
    results = Graph((a,), (total, same), tuple(equations)).run(jnp.ones(3))
    np.testing.assert_array_equal(results, [[2.0, 3.0, 4.0], [1.0, 1.0, 1.0]])


def test_emitted_equations_have_the_labels_of_another():
    graph, _ = from_jaxpr(jax.make_jaxpr(jnp.sin)(1.0), transposed=True, late=True)
    (old,) = graph.equations
    (new,), _ = emit(jnp.cos, old.inputs, like=old)
    assert (new.name, new.source, new.transposed, new.late) == ("cos", old.source, True, True)


def test_bodies_are_the_jaxprs_inside_of_an_equation():
    (call,) = from_jaxpr(jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0))[0].equations[-1:]
    assert sorted(body.eqns[0].primitive.name for body in bodies(call.params)) == ["cos", "sin"]
