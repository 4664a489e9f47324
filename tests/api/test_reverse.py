"""`mpmd_jit_rev`: results are made on the ranks that are to hold them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp

MESH = jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")


def init(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 2)
    return {"first": {"w": jax.random.normal(keys[0], (4, 6))}, "last": jax.random.normal(keys[1], (4, 6)), "step": 0}


def test_each_rank_makes_its_own():
    replicated = NamedSharding(MESH.lowering_mesh(), P())
    made = jaxpp.mpmd_jit_rev(
        init,
        MESH,
        out_refs={"first": {"w": {0}}, "last": {1}, "step": {0, 1}},
        in_shardings=replicated,
        out_shardings={"first": P("data"), "last": NamedSharding(MESH.unstack[0], P("stage", "data")), "step": None},
    )(jax.random.key(3))
    plain = jax.jit(init)(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, made), plain)
    assert made["first"]["w"].mpmd_idxs == (0,)
    assert made["last"].mpmd_idxs == (1,)
    assert made["step"].mpmd_idxs == (0, 1)
    assert made["step"].weak_type, "as under jax.jit: a step that is compiled for this state takes it"
    assert not made["last"].weak_type
    assert made["first"]["w"].spec == P("data")
    assert made["last"].spec == P(None, "data")  # the ranks' axis is dropped
    assert {d.id for d in made["last"].first_mpmd_replica.sharding.device_set} == {2, 3}


def test_the_mesh_of_the_caller_does_not_matter():
    """A constraint names the axes of a rank, whether or not the caller has set the mesh of all ranks."""

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x + 1, P("data"))

    make = jaxpp.mpmd_jit_rev(constrained, MESH, out_refs={0, 1})
    with jax.set_mesh(MESH.lowering_mesh()):
        inside = make(jnp.ones(2))
    for made in (inside, make(jnp.ones(2))):
        np.testing.assert_array_equal(made, np.full(2, 2.0))
        assert made.mpmd_idxs == (0, 1)


def test_a_result_of_no_rank_goes_to_rank_0():
    made = jaxpp.mpmd_jit_rev(lambda x: x + 1, MESH, out_refs=set())(jnp.ones(2))
    assert made.mpmd_idxs == (0,)


def test_a_kind_of_memory_is_kept():
    host = NamedSharding(MESH.unstack[0], P(), memory_kind="pinned_host")
    made = jaxpp.mpmd_jit_rev(lambda x: x + 1, MESH, out_refs={1}, out_shardings=host)(jnp.ones(2))
    assert made.sharding.memory_kind == made.first_mpmd_replica.sharding.memory_kind == "pinned_host"


def test_a_second_call_compiles_nothing():
    traced = []

    def add_one(x: jax.Array) -> jax.Array:
        traced.append(x)
        return x + 1

    run = jaxpp.mpmd_jit_rev(add_one, MESH, out_refs={0, 1})
    for value in (1.0, 2.0):
        before = len(traced)
        np.testing.assert_array_equal(run(jnp.full(2, value)), np.full(2, value + 1, np.float32))
    assert len(traced) - before <= 1  # the types of the results, if JAX has forgotten them


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"out_shardings is PartitionSpec\('x',\)|out_shardings is P\('x',?\), but"):
        jaxpp.mpmd_jit_rev(lambda x: x + 1, MESH, out_refs={0}, out_shardings=P("x"))(jnp.ones(2))
    with pytest.raises(NotImplementedError, match=r"mpmd_jit_rev got donate_argnums=0: .* Leave it out"):
        jaxpp.mpmd_jit_rev(init, MESH, out_refs={}, donate_argnums=0)
    with pytest.warns(UserWarning, match="mpmd_jit_rev got use_pgle=True, which has no effect"):
        jaxpp.mpmd_jit_rev(init, MESH, out_refs={}, use_pgle=True)


@pytest.mark.parametrize(
    ("refs", "text"),
    [
        ({"a": {0}}, "out_refs is not a prefix of the tree"),
        ({"a": {0}, "b": 1}, r"out_refs\['b'\] is 1, but it must be a set of ranks"),
        (None, "out_refs is None, but it must be a set of ranks"),
        ({"a": {0}, "b": {7}}, "rank 7 is not in"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(refs, text):
    make = jaxpp.mpmd_jit_rev(lambda x: {"a": x, "b": x + 1}, MESH, out_refs=refs)
    with pytest.raises((TypeError, ValueError), match=text):
        make(jnp.ones(2))
