"""Arrays of this front: with ordered replicas, on rank 0 if nothing reads them."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpp_flax
import jaxpp_flax.api as jaxpp


@pytest.fixture
def mesh() -> jaxpp.MpmdMesh:
    return jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:3]), ("stage",)), "stage")


def on_ranks(mesh: jaxpp.MpmdMesh, ranks: set[int]) -> jaxpp.MpmdArray:
    return jaxpp.spmd_to_mpmd_reshard(mesh, np.arange(3.0), jaxpp.MpmdSharding(mesh, ranks, P()))


def test_an_array_is_that_of_the_engine(mesh: jaxpp.MpmdMesh):
    x, y = on_ranks(mesh, {1}), on_ranks(mesh, {1})
    assert jaxpp.MpmdArray is jaxpp_flax.MpmdArray
    assert (x == y).all()


def test_replicas_are_ordered(mesh: jaxpp.MpmdMesh):
    parts = on_ranks(mesh, {2, 0})._partially_addressable_arrays
    assert list(parts) == [0, 2]
    made = jaxpp.MpmdArray([parts[2], parts[0]], jaxpp.MpmdSharding(mesh, {0, 2}, P()))
    assert list(made._partially_addressable_arrays.items()) == list(parts.items())


def test_jax_takes_it(mesh: jaxpp.MpmdMesh):
    x = on_ranks(mesh, {1})
    for y in (jax.jit(lambda x: x + 1)(x), jnp.add(x, 1), x + 1):
        np.testing.assert_array_equal(y, np.arange(1.0, 4))
    assert isinstance(copy.deepcopy(x), jaxpp.MpmdArray)
    [back] = jax.tree.leaves(jaxpp.mpmd_to_spmd_reshard(mesh, [x], jax.sharding.NamedSharding(mesh.jax_mesh, P())))
    np.testing.assert_array_equal(back, np.arange(3.0))


def test_an_array_that_nothing_reads_goes_to_rank_0(mesh: jaxpp.MpmdMesh):
    x = on_ranks(mesh, set())
    assert (x.mpmd_idxs, x.sharding.mesh_ids) == ((0,), {0})


def test_a_weak_type_is_kept(mesh: jaxpp.MpmdMesh):
    [x] = jaxpp.spmd_to_mpmd_reshard(mesh, [jnp.asarray(3)], jaxpp.MpmdSharding(mesh, {1}, P()))
    assert x.weak_type
    assert x.to_mpmd_local_array.weak_type
    assert not on_ranks(mesh, {1}).weak_type
