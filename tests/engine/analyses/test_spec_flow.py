"""Predicted partitions, beside those that XLA chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.analyses.spec_flow import specs_after
from jaxpp_flax.engine.arrays.mesh import canonical
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr

SIZES = {"data": 2, "tensor": 2}
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(SIZES))
X, W = (8, 16), (16, 16)
ARGUMENTS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, W)]
ROWS, COLUMNS, BOTH = P("data"), P(None, "tensor"), P("data", "tensor")


def traced(function: Callable[..., object]) -> Graph:
    return inline(from_jaxpr(jax.make_jaxpr(function)(*ARGUMENTS))[0], flatten=True)


def placed(x: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def layers(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A carry that starts whole and takes what the body makes of it; and what each turn puts out."""
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), x.sum(0)), x, length=3)


def summed(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sum that starts at zero, over rows that a scan reads one by one."""
    return lax.scan(lambda total, row: (total + row, row * 2), jnp.zeros(16), x)


def made_anew(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A carry whose next value is made of nothing that is cut: it is cut as the carry is."""

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        new = jnp.full(X, x.sum())
        return new, new * 2

    return lax.scan(turn, x, length=2)


def kept(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A carry that the body reads, and hands on as it was."""
    return lax.scan(lambda x, row: (x, x * row), x, w[:4])


@pytest.mark.parametrize(
    ("function", "specs", "wanted"),
    [
        (lambda x, w: jnp.sin(x) + 1, (BOTH, P()), [BOTH]),
        (lambda x, w: x + w[:8], (ROWS, COLUMNS), [BOTH]),
        (lambda x, w: x @ w, (ROWS, COLUMNS), [BOTH]),
        (lambda x, w: x @ w, (COLUMNS, P("tensor")), [P()]),  # summed over
        (lambda x, w: (x.T, x.sum(0), x.max(1)), (BOTH, P()), [P("tensor", "data"), P("tensor"), ROWS]),
        (lambda x, w: x.reshape(2, 4, 16), (ROWS, P()), [ROWS]),
        (lambda x, w: jnp.cumsum(x, 1), (ROWS, P()), [ROWS]),
        (lambda x, w: jax.jit(jnp.sin)(x), (BOTH, P()), [BOTH]),
        (lambda x, w: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (ROWS, P()), [ROWS]),
        (lambda x, w: placed(x, COLUMNS), (ROWS, P()), [COLUMNS]),
        (lambda x, w: placed(x, P(P.UNCONSTRAINED, "tensor")), (ROWS, P()), [BOTH]),
        (layers, (ROWS, P()), [ROWS, P()]),
        (layers, (P(), COLUMNS), [COLUMNS, COLUMNS]),
        (summed, (COLUMNS, P()), [P("tensor"), COLUMNS]),
        (made_anew, (ROWS, P()), [ROWS, P()]),
        (kept, (ROWS, P()), [ROWS, P(None, "data")]),
    ],
)
def test_results_are_cut_as_xla_cuts_them(function: Callable[..., object], specs: Sequence[P], wanted: Sequence[P]):
    graph = traced(function)
    found = specs_after(graph, specs, SIZES)
    assert [found.get(value, P()) for value in graph.outputs] == list(wanted)
    shardings = [NamedSharding(MESH, spec) for spec in specs]
    chosen = jax.jit(function, in_shardings=shardings).lower(*ARGUMENTS).compile().output_shardings
    assert [canonical(sharding.spec) for sharding in jax.tree.leaves(chosen)] == list(wanted)


def test_what_has_no_partition_takes_that_of_what_reads_it():
    """As XLA lets a partition flow back, to operands that nothing else cuts; those of the step stay as they are."""

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return placed(jnp.sin(jnp.ones(X)) + x, BOTH) * w[:8]

    graph = traced(function)
    found = specs_after(graph, (P(), P()), SIZES)
    (sine,) = [e.outputs[0] for e in graph.equations if e.name == "sin"]
    assert found[sine] == BOTH
    assert not set(graph.inputs) & set(found)


def test_a_dimension_is_not_cut_in_more_parts_than_divide_it():
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x, y: x + y)(jnp.ones((6, 3)), jnp.ones((6, 3))))
    found = specs_after(graph, (P(("data", "tensor")), P(None, "tensor")), SIZES)
    assert found[graph.outputs[0]] == P("data")  # 6 rows are not cut in four, 3 columns not in two
    assert specs_after(graph, (P(), P()), {"data": 1}) == {}
