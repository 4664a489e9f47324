"""A step that is placed: where its arguments go, before anything is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import MpmdFunction, one_pass
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from tests.engine.toys import mesh_of


def test_arguments_and_captured_constants():
    mesh = mesh_of(2)
    captured, matrix = jnp.arange(3.0), jnp.eye(3)

    def fun(w: list[jax.Array], x: jax.Array, unread: jax.Array) -> jax.Array:
        return mark_stage_end(x @ w[0]) @ w[1] + captured

    function = MpmdFunction(one_pass(fun, mesh), mesh)
    compiled = function.compile([matrix, matrix], matrix, matrix)
    placed = compiled.placed
    assert [tuple(ranks) for ranks in placed.program.arguments] == [(1,), (0,), (1,), (0,), ()]
    assert placed.in_specs == [P()] * 5
    assert [value.aval.shape for value in placed.inputs] == [(3,), *[(3, 3)] * 4]
    (w, x, unread), kwargs = placed.in_shardings
    assert [sharding.mesh_ids for sharding in (*w, x, unread)] == [{0}, {1}, {0}, set()]
    assert kwargs == {}
    assert jax.tree.leaves(compiled.in_shardings) == [*w, x, unread]
