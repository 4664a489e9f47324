"""MpmdMesh and MpmdSharding."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding, axes_in, canonical, carried_over, keep_axes
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray


def grid(*shape: int) -> np.ndarray:
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


def stage_data(stages: int = 4, data: int = 2) -> MpmdMesh:
    return MpmdMesh(Mesh(grid(stages, data), ("stage", "data")), "stage")


def test_each_rank_has_the_devices_at_its_position():
    mesh = stage_data()
    assert (mesh.mpmd_dim, mesh.mpmd_axis, len(mesh.unstack)) == (4, 0, 4)
    for rank in range(4):
        assert dict(mesh.unstack[rank].shape) == {"stage": 1, "data": 2}
        assert mesh.rank_devices(rank) == tuple(jax.devices()[2 * rank : 2 * rank + 2])


def test_the_rank_axis_may_stand_anywhere():
    mesh = MpmdMesh(Mesh(grid(2, 4), ("data", "stage")), "stage")
    assert mesh.mpmd_axis == 1
    assert mesh.rank_devices(1) == (jax.devices()[1], jax.devices()[5])


def test_a_mesh_of_ranks_alone_gives_submeshes_that_hold_arrays():
    mesh = MpmdMesh(Mesh(grid(4), ("stage",)), "stage")
    for rank, submesh in enumerate(mesh.unstack):
        assert dict(submesh.shape) == {"stage": 1}
        assert jax.device_put(jnp.ones(3), NamedSharding(submesh, P())).devices() == {jax.devices()[rank]}


def test_axis_types_are_kept():
    types = (AxisType.Auto, AxisType.Auto, AxisType.Explicit)
    mesh = MpmdMesh(Mesh(grid(2, 2, 2), ("stage", "data", "tensor"), axis_types=types), "stage")
    # The ranks' own axis goes with the others: where all of them are Explicit, all of a stage's are.
    assert mesh.unstack[1].axis_types == (AxisType.Explicit, *types[1:])
    assert mesh.mpmd_submesh([1]).jax_mesh.axis_types == types
    # `jax.make_mesh` makes Explicit axes; the ranks' own one must not enter the types of a stage's arrays.
    assert MpmdMesh(jax.make_mesh((4,), ("stage",)), "stage").unstack[0].axis_types == (AxisType.Auto,)


def test_all_ranks_share_one_abstract_submesh():
    mesh = stage_data()
    assert all(submesh.abstract_mesh == mesh.abstract_submesh for submesh in mesh.unstack)
    assert mesh.lowering_mesh() == mesh.unstack[0]


def test_submesh_of_some_ranks():
    mesh = stage_data().mpmd_submesh([3, 1])
    assert (mesh.mpmd_dim, mesh.jax_mesh.axis_names, mesh.mpmd_axis_name) == (2, ("stage", "data"), "stage")
    assert mesh.rank_devices(0) == stage_data().rank_devices(3)


def test_equal_meshes_are_equal_and_hash_alike():
    assert stage_data() == stage_data()
    assert hash(stage_data()) == hash(stage_data())
    assert stage_data() != stage_data(2, 4)
    assert stage_data() != MpmdMesh(Mesh(grid(4, 2), ("stage", "data")), "data")


def test_one_device_may_hold_several_ranks():
    device = jax.devices()[0]
    mesh = MpmdMesh(Mesh(np.array([device] * 4), ("stage",)), "stage")
    assert mesh.mpmd_dim == 4
    assert [mesh.rank_devices(rank) for rank in range(4)] == [(device,)] * 4
    assert mesh.local_ranks == (0, 1, 2, 3)


def test_one_process_owns_every_rank():
    mesh = stage_data()
    assert mesh.local_ranks == (0, 1, 2, 3)
    assert mesh.is_local(3)


def test_errors_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match=r"no axis 'pipe'; its axes are \{'stage': 4, 'data': 2\}.*mpmd_axis_name"):
        MpmdMesh(Mesh(grid(4, 2), ("stage", "data")), "pipe")
    with pytest.raises(TypeError, match=r"got list. Build one with `jax.sharding.Mesh"):
        MpmdMesh(jax.devices(), "stage")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got AbstractMesh"):
        MpmdMesh(stage_data().jax_mesh.abstract_mesh, "stage")  # type: ignore[arg-type]
    for rank in (4, -1):
        with pytest.raises(ValueError, match=rf"rank {rank} is not in MpmdMesh.*are 0 to 3"):
            stage_data().rank_devices(rank)
    with pytest.raises(ValueError, match="got no rank"):
        stage_data().mpmd_submesh([])


class TestSharding:
    def test_is_the_named_sharding_over_its_ranks(self):
        mesh = stage_data()
        sharding = MpmdSharding(mesh, [3, 1], P("data"))
        assert isinstance(sharding, NamedSharding)
        assert (sharding.mesh_ids, sharding.ranks) == (frozenset({1, 3}), (1, 3))
        assert sharding.mesh == mesh.mpmd_submesh([1, 3]).jax_mesh
        assert sharding.device_set == {*mesh.rank_devices(1), *mesh.rank_devices(3)}
        assert sharding == sharding.sharding
        assert type(sharding.sharding) is NamedSharding
        placed = jax.device_put(jnp.arange(4.0), sharding)
        assert placed.sharding.is_equivalent_to(sharding, 1)
        assert jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding).sharding == sharding

    def test_local_shardings_lie_on_the_submeshes(self):
        mesh = stage_data()
        sharding = MpmdSharding(mesh, {1}, P("data"))
        assert sharding.local_sharding(1) == NamedSharding(mesh.unstack[1], P("data"))
        assert sharding.local_sharding(1) is sharding.local_sharding(1)

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            (P(("stage", "data"), None), P("data", None)),
            (P("stage"), P(None)),
            (P(None, "data"), P(None, "data")),
            (P(("stage",), ("data", "stage")), P(None, "data")),
        ],
    )
    def test_the_ranks_axis_is_dropped_from_the_spec(self, spec: P, expected: P):
        assert MpmdSharding(stage_data(), {0}, spec).spec == expected

    def test_ranks_tell_shardings_on_one_device_apart(self):
        mesh = MpmdMesh(Mesh(np.array([jax.devices()[0]] * 4), ("stage",)), "stage")
        first, second = MpmdSharding(mesh, {0}, P()), MpmdSharding(mesh, {1}, P())
        assert first != second
        assert first == MpmdSharding(mesh, {0}, P())
        assert hash(first) == hash(MpmdSharding(mesh, {0}, P()))
        # A mesh names a device once.
        assert MpmdSharding(mesh, {0, 1, 2}, P()).mesh.size == 1

    def test_without_ranks_it_is_the_place_of_an_argument_that_nothing_reads(self):
        unread, first = MpmdSharding(stage_data(), (), P("data")), MpmdSharding(stage_data(), {0}, P("data"))
        assert (unread.mesh_ids, unread.ranks, repr(unread)[:25]) == (frozenset(), (0,), "MpmdSharding(mesh_ids={},")
        assert unread != first
        assert unread.sharding == first.sharding
        assert copy.copy(unread) == unread
        x = MpmdArray([jax.device_put(np.zeros(4), unread.local_sharding(0))], unread)
        assert x.sharding == first

    def test_errors(self):
        with pytest.raises(ValueError, match="rank 7 is not in"):
            MpmdSharding(stage_data(), {7}, P())
        with pytest.raises(ValueError, match="tensor"):
            MpmdSharding(stage_data(), {0}, P("tensor"))

    def test_repr_and_memory_kind(self):
        sharding = MpmdSharding(stage_data(), {2, 0}, P("data"), memory_kind="pinned_host")
        shown = "MpmdSharding(mesh_ids={0, 2}, spec=P('data',), mesh={'stage': 4, 'data': 2}"
        assert repr(sharding) == f"{shown}, memory_kind='pinned_host')"
        assert repr(MpmdSharding(stage_data(), {2, 0}, P("data"))) == f"{shown})"
        assert sharding.local_sharding(0).memory_kind == "pinned_host"
        assert sharding != MpmdSharding(stage_data(), {2, 0}, P("data"))

    def test_reduce_rebuilds_it(self):
        sharding = MpmdSharding(stage_data(), {2, 0}, P("data"))
        function, arguments = sharding.__reduce__()
        assert function(*arguments) == sharding


def test_reduced_and_unreduced_axes_of_a_spec_are_kept():
    spec = P("data", None, unreduced={"fsdp"}, reduced={"tensor"})
    assert canonical(spec) == P("data", unreduced={"fsdp"}, reduced={"tensor"})
    assert keep_axes(spec, {"data", "fsdp"}.__contains__) == P("data", None, unreduced={"fsdp"})
    assert axes_in(spec) == ["data"]


@pytest.mark.parametrize(
    ("spec", "carried"),
    [
        (P("data", "tensor"), P("data", "tensor")),
        (P("fsdp", "tensor"), P(None, "tensor")),  # the other mesh has no such axis
        (P("tensor", "data"), P("tensor")),  # 3 columns are not cut in two
        (P(("data", "tensor")), P(("data", "tensor"))),
        (P(("fsdp", "data")), P("data")),
        (P(None, ("tensor", "data")), P(None, "tensor")),
        (P(("data", "tensor", "rows")), P(("data", "tensor"))),  # 12 rows are not cut in 24
        (P(), P()),
        (P("tensor", unreduced={"data"}), P("tensor", unreduced={"data"})),
    ],
)
def test_a_partition_goes_to_another_mesh_as_far_as_it_fits(spec: P, carried: P):
    other = jax.sharding.AbstractMesh((2, 3, 4), ("data", "tensor", "rows"))
    assert carried_over(spec, other, (12, 3)) == carried
