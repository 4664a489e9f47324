"""The names of a mesh that JaxPP's programs use: ranks found by mesh, by device and by process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from jaxpp_flax.engine.arrays.mesh import MpmdMesh


def grid(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("stage", "data")[: len(shape)])


def test_ranks_are_found_by_mesh_and_by_device():
    mesh = jaxpp.MpmdMesh(grid(4, 2), "stage")
    assert [mesh.mpmd_idx_for_mesh[submesh] for submesh in mesh.unstack] == [0, 1, 2, 3]
    assert mesh.device_mpmd_idx[mesh.rank_devices(2)[1]] == 2
    assert mesh.mpmd_indices_for_mesh(mesh.unstack[3]) == (3,)
    assert mesh.mpmd_indices_for_mesh(mesh.mpmd_submesh([3, 1]).jax_mesh) == (1, 3)
    assert mesh.mpmd_indices_for_mesh(grid(3)) is None
    shared = jaxpp.MpmdMesh(Mesh(np.array([jax.devices()[0]] * 2), ("stage",)), "stage")
    assert shared.device_mpmd_idx == {jax.devices()[0]: 0}
    assert shared.mpmd_idx_for_mesh == {shared.unstack[0]: 0}


def test_names_of_other_versions():
    mesh = jaxpp.MpmdMesh(grid(4, 2), "stage")
    assert mesh.as_mpmd_mesh is mesh
    assert mesh.device_coords[mesh.rank_devices(2)[1]] == (2, 1)
    assert repr(mesh) == f"MpmdMesh(jax_mesh={mesh.jax_mesh!r}, mpmd_axis_name='stage')"
    with mesh as entered, mesh.mpmd_submesh([1]) as inner:
        assert entered is mesh
        assert jaxpp.MpmdMesh.mesh_stack == [mesh, inner]
    assert jaxpp.MpmdMesh.mesh_stack == []


def test_the_only_rank_of_a_process():
    mesh = jaxpp.MpmdMesh(grid(4, 2), "stage")
    with pytest.raises(ValueError, match=r"owns devices of the ranks \(0, 1, 2, 3\).*Use `local_ranks`"):
        _ = mesh.my_mpmd_axis_index
    alone = mesh.mpmd_submesh([2])
    assert isinstance(alone, jaxpp.MpmdMesh)
    assert alone.my_mpmd_axis_index == 0
    assert alone.my_mpmd_group_mesh == alone.unstack[0]


def test_it_is_equal_to_the_mesh_of_the_engine():
    ours, theirs = MpmdMesh(grid(4), "stage"), jaxpp.MpmdMesh(grid(4), "stage")
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert jaxpp.MpmdSharding(ours, {1}, P()) == jaxpp.MpmdSharding(theirs, {1}, P())
    [x] = jaxpp.spmd_to_mpmd_reshard(ours, [np.arange(3.0)], jaxpp.MpmdSharding(theirs, {1}, P()))
    np.testing.assert_array_equal(x, np.arange(3.0))


def test_arrays_that_the_engine_makes_have_the_given_mesh():
    mesh = jaxpp.MpmdMesh(grid(2), "stage")
    forward = jaxpp.mpmd_jit_by_yield(lambda w, x: jaxpp.mark_stage_end(x @ w[0]) @ w[1], mesh)
    y = forward([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))
    assert isinstance(y, jaxpp.MpmdArray)
    assert y.sharding.mpmd_mesh is mesh
