"""Work that a body maps over the shards itself: every result keeps the mapped dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.analyses.batch_flow import propagate
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import from_jaxpr

SHARDS = 2
TABLE, IDS, X = np.ones((5, 3), np.float32), np.zeros((SHARDS, 4), np.int32), np.ones((SHARDS, 4, 3), np.float32)
MAPPED: dict[str, Callable[..., Any]] = {
    "embedding": lambda ids, x: jnp.asarray(TABLE)[ids],
    "embedding_gradient": lambda ids, x: jax.grad(lambda t: (t[ids] * x).sum())(jnp.asarray(TABLE)),
    "rows_gradient": lambda ids, x: jax.grad(lambda t: (t[:, jnp.array([0, 2])] ** 2).sum())(x),
    "rows": lambda ids, x: x[:, jnp.array([0, 2])],
    "scatter_of_updates": lambda ids, x: jnp.zeros((6, 3)).at[jnp.arange(4)].set(x),
    "take_along_axis": lambda ids, x: jnp.take_along_axis(x, ids[:, None], axis=1),
    "split": lambda ids, x: jnp.split(x, 3, axis=1),
    "softmax": lambda ids, x: jax.nn.softmax(x) + jax.nn.one_hot(ids, 3),
    "scan": lambda ids, x: jax.lax.scan(lambda h, w: (jnp.tanh(h * w), h.sum()), x, jnp.asarray(TABLE))[1],
    "attention": lambda ids, x: jnp.einsum("qd,kd->qk", x, x) @ x,
}


def dims_of(function: Callable[..., Any], *operands: Any) -> list[Any]:
    graph, consts = from_jaxpr(jax.make_jaxpr(function)(*operands))
    graph = inline(graph, flatten=True)
    known = dict.fromkeys(graph.inputs[len(consts) :], (0, "data"))
    dims = propagate(graph.equations, known, lambda axes: SHARDS)
    return [dims.get(v) for v in graph.outputs]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_dimension_is_found_in_every_result(name: str):
    found = dims_of(jax.vmap(MAPPED[name]), IDS, X)
    assert found == [(0, "data")] * len(found)


@pytest.mark.parametrize("name", ["rows", "take_along_axis", "scatter_of_updates"])
def test_the_dimension_is_found_where_it_stands(name: str):
    """Mapped over the second axis of each operand, the results have it second."""
    moved = jax.vmap(MAPPED[name], in_axes=1, out_axes=1)
    (found,) = dims_of(lambda ids, x: moved(ids.swapaxes(0, 1), x.swapaxes(0, 1)), IDS, X)
    assert found == (1, "data")


@pytest.mark.parametrize(("results", "at"), [("NCH", 0), ("HNC", 1), ("CHN", 2)])
def test_a_convolution_keeps_the_examples_where_its_numbers_say(results: str, at: int):
    def convolved(x: Any) -> Any:
        window = np.ones((5, 4, 2), np.float32)  # to 5 features, from 4
        return jax.lax.conv_general_dilated(
            x.transpose(1, 2, 0), window, (1,), "SAME", dimension_numbers=("CHN", "OIH", results)
        )

    assert dims_of(convolved, X) == [(at, "data")]


def test_a_reshape_leaves_the_major_axes_to_the_major_part():
    """MaxText shards its batch over all axes, and splits it into one part for each shard over "data"."""
    sizes = {"data": 2, "fsdp": 4}
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x: (x.reshape(2, 8), x.reshape(8, 2), x.reshape(1, 16)))(np.ones(16)))
    dims = propagate(graph.equations, {graph.inputs[0]: (0, ("data", "fsdp"))}, ShardCounts(sizes))
    assert [dims.get(v) for v in graph.outputs] == [(0, "data"), (0, ("data", "fsdp")), (1, ("data", "fsdp"))]  # type: ignore[arg-type]


def test_a_constraint_keeps_the_dimension_unless_it_asks_for_whole_values():
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("data",), axis_types=(AxisType.Auto,))

    def constrained(*spec: Any) -> Callable[..., Any]:
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    mapped = jax.vmap(constrained(None, None), spmd_axis_name="data")
    assert dims_of(mapped, X) == dims_of(constrained("data"), X) == [(0, "data")]
    assert dims_of(constrained(P.UNCONSTRAINED, None), X) == [(0, "data")]
    assert dims_of(constrained(), X) == dims_of(constrained(None, "data"), X) == [None]
