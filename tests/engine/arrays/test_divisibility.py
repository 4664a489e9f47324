"""Specs that cannot cut an argument or a result evenly are refused by its name, before anything runs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import mesh_of


def step(params, batch):
    def loss(params, x):
        return jnp.mean((mark_stage_end(x @ params["w"]) ** 2).sum(0))

    losses, grads = treduce(partial(jax.value_and_grad(loss), params), batch, schedule=Std1F1B(2))
    return losses, grads


@pytest.mark.parametrize(
    ("width", "examples", "specs", "message"),
    [
        (
            4,
            3,
            {"in_specs": (P(), P(None, "data"))},
            r"argument\[1\] has shape \(2, 3, 4\), .* its dimension 1 into 2 ",
        ),
        (3, 4, {"in_specs": ({"w": P("data")}, P())}, r"argument\[0\]\['w'\] .*3 is no multiple of 2. .* 2 or 4, or"),
        (3, 4, {"out_specs": (None, {"w": P("data")})}, r"result\[1\]\['w'\] has shape \(3, 4\), .*dimension 0 into 2"),
        (4, 4, {"in_specs": (P(None, None, "data"), P())}, r"argument\[0\]\['w'\] .* how 3 dimensions are cut"),
    ],
)
def test_refusals(width, examples, specs, message):
    mesh = mesh_of(2, data=2)
    function = mpmd_jit_with_loop(step, mesh, **specs)
    with pytest.raises(ValueError, match=message):
        function({"w": jnp.ones((width, 4))}, jnp.ones((2, examples, width)))
