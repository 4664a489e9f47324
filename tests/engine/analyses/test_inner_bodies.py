"""The bodies of shard_maps that end in a sum over the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.analyses.inner_bodies import ends_in_sum
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import from_jaxpr

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x.shape)
    return lax.psum(x, "data")


@pytest.mark.parametrize(
    ("body", "names", "axes", "ends"),
    [
        (lambda x: lax.psum(x, "data"), ["data"], {"data", "tensor"}, True),
        (lambda x: lax.psum(x, ("data", "tensor")), ["data"], {"data", "tensor"}, True),
        (lambda x: lax.psum(x, "data") * 2, ["data"], {"data", "tensor"}, False),  # goes on after the sum
        (lambda x: x * 2, ["data"], {"data", "tensor"}, False),
        (lambda x: lax.psum(x, "tensor"), ["data"], {"data", "tensor"}, False),  # over other devices
        (lambda x: lax.psum(x, "tensor"), ["tensor", "data"], {"data", "tensor"}, False),
        (lambda x: lax.pmax(x, "data"), ["data"], {"data", "tensor"}, False),
        (printed, ["data"], {"data", "tensor"}, False),  # an effect would happen twice
    ],
)
def test_a_sum_is_found_where_it_is_the_last_thing(
    body: Callable[[jax.Array], jax.Array], names: Sequence[str], axes: set[str], ends: bool
):
    mapped = jax.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P(), axis_names=axes, check_vma=False)
    graph, _ = from_jaxpr(jax.make_jaxpr(mapped)(jnp.ones((4, 8))))
    (equation,) = graph.equations
    assert ends_in_sum(equation, body_of(equation), 0, names) is ends


def test_axes_that_an_outer_shard_map_owns_are_left_alone():
    inner = lambda x: lax.psum(x, ("data", "tensor"))  # noqa: E731

    def outer(x: jax.Array) -> jax.Array:
        return jax.shard_map(inner, in_specs=P(), out_specs=P(), axis_names={"tensor"}, check_vma=False)(x)

    mapped = jax.shard_map(outer, mesh=MESH, in_specs=P("data"), out_specs=P(), axis_names={"data"}, check_vma=False)
    graph, _ = from_jaxpr(jax.make_jaxpr(mapped)(jnp.ones((4, 8))))
    (equation,) = body_of(graph.equations[0]).equations
    assert ends_in_sum(equation, body_of(equation), 0, ["tensor"])
    assert not ends_in_sum(equation, body_of(equation), 0, ["data"])
