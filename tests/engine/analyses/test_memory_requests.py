"""Requests for memory in a traced graph; the whole way from a step is in tests/engine/test_memory_kinds.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.analyses.memory_requests import check_memory_requests
from jaxpp_flax.engine.tracing.ir import from_jaxpr

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
HOST = NamedSharding(MESH, P(), memory_kind="pinned_host")


def check(function: Any) -> None:
    graph, _ = from_jaxpr(jax.make_jaxpr(function)(jnp.ones(2)))
    check_memory_requests(graph, jax.devices()[:2])


def test_what_is_kept_passes():
    check(lambda x: jax.device_put(jax.device_put(x, HOST), jax.memory.Space.Device) + 1)
    check(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("data"))))


def test_a_constraint_is_found_at_any_depth():
    def body(carry: Any, _: Any) -> Any:
        return jax.lax.with_sharding_constraint(carry, HOST), None

    for function in (lambda x: body(x, None)[0], lambda x: jax.lax.scan(body, x, None, length=2)[0]):
        with pytest.raises(ValueError, match=r"constraint at .*test_memory_requests.py.* names .*'pinned_host'"):
            check(function)


@pytest.mark.parametrize("kind", ["hbm9", "unpinned_host", "device", "pinned_host"])
def test_a_policy_that_offloads_to_an_unknown_memory_is_refused(kind: str):
    """JAX writes a copy from device memory to device memory, for which the user's own copy stands in another case."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst=kind
    )

    def loss(x: Any) -> Any:
        return jax.checkpoint(lambda x: jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x), "h"))), policy=policy)(x)

    def step(x: Any) -> Any:
        return jax.grad(loss)(jax.device_put(jnp.cos(x), jax.memory.Space.Device, may_alias=False))

    if kind in ("device", "pinned_host"):
        check(step)
        return
    text = rf"offload of the `name` at .*test_memory_requests.py.*policy, has the memory kind '{kind}'.*'pinned_host'"
    with pytest.raises(ValueError, match=text):
        check(step)
