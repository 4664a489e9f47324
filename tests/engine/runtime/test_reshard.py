"""Moving trees between ordinary arrays and ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime import reshard
from jaxpp_flax.engine.runtime.reshard import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from tests.engine.toys import mesh_of
from tests.processes.running import run_processes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(axis_type: AxisType = AUTO) -> MpmdMesh:
    return mesh_of(2, axis_type, fsdp=4)


def values() -> dict[str, np.ndarray]:
    """A tree with the dtypes and shapes that states have."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(8, 4)).astype(np.float32),
        "half": rng.normal(size=(4,)).astype(jnp.bfloat16),
        "step": np.array(3, np.int32),
        "mask": np.array([True, False, True, True]),
        "zero": np.array([-0.0, np.nan, np.inf, 0.0], np.float32),
        "none": np.zeros((0, 4), np.float32),
    }


def targets(mesh: MpmdMesh) -> dict[str, MpmdSharding]:
    return {
        "w": MpmdSharding(mesh, {0}, P("fsdp")),
        "half": MpmdSharding(mesh, {1}, P("fsdp")),
        "step": MpmdSharding(mesh, {0, 1}, P()),
        "mask": MpmdSharding(mesh, {1}, P()),
        "zero": MpmdSharding(mesh, {1}, P("fsdp")),
        "none": MpmdSharding(mesh, {0}, P()),
    }


def on(mesh: MpmdMesh, spec: P, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh.jax_mesh, spec)), tree)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


class TestThereAndBack:
    @pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
    def test_every_leaf_lands_where_its_sharding_says(self, axis_type: AxisType):
        mesh = make_mesh(axis_type)
        there = spmd_to_mpmd_reshard(mesh, on(mesh, P(), values()), targets(mesh))
        assert_same(there, values())
        for name, leaf in there.items():
            assert isinstance(leaf, MpmdArray)
            assert leaf.sharding == targets(mesh)[name]
            for rank, part in leaf._partially_addressable_arrays.items():
                assert part.sharding == leaf.sharding.local_sharding(rank)
        back = mpmd_to_spmd_reshard(mesh, there, NamedSharding(mesh.jax_mesh, P()))
        assert_same(back, values())
        assert all(leaf.sharding == NamedSharding(mesh.jax_mesh, P()) for leaf in back.values())

    def test_from_and_to_shardings_over_the_ranks_axis(self):
        mesh = make_mesh()
        value = np.arange(64, dtype=np.float32).reshape(8, 8)
        [there] = spmd_to_mpmd_reshard(
            mesh, on(mesh, P(("stage", "fsdp")), [value]), [MpmdSharding(mesh, {1}, P(None, ("stage", "fsdp")))]
        )
        assert there.spec == P(None, "fsdp")
        [back] = mpmd_to_spmd_reshard(mesh, [there], [NamedSharding(mesh.jax_mesh, P(("stage", "fsdp")))])
        assert [shard.data.shape for shard in back.addressable_shards] == [(1, 8)] * 8
        assert_same(back, value)

    def test_host_values_scalars_and_single_devices(self):
        mesh = make_mesh()
        tree = {"numpy": np.ones(4, np.float32), "float": 2.5, "int": 3, "device": jnp.arange(4)}
        there = spmd_to_mpmd_reshard(mesh, tree, MpmdSharding(mesh, {1}, P()))
        assert (there["float"].dtype, float(there["float"]), int(there["int"])) == (jnp.float32, 2.5, 3)
        assert tree["device"].is_deleted()
        back = mpmd_to_spmd_reshard(mesh, there, SingleDeviceSharding(jax.devices()[7]))
        assert back["device"].devices() == {jax.devices()[7]}
        np.testing.assert_array_equal(back["device"], np.arange(4))

    def test_from_ranks_to_other_ranks(self):
        mesh = make_mesh()
        first = spmd_to_mpmd_reshard(mesh, values(), MpmdSharding(mesh, {0}, P()))
        second = spmd_to_mpmd_reshard(mesh, first, MpmdSharding(mesh, {1}, P()))
        assert second["w"].mpmd_idxs == (1,)
        assert first["w"].is_deleted()
        assert_same(second, values())

    def test_prng_keys(self):
        mesh = make_mesh()
        [key] = spmd_to_mpmd_reshard(mesh, [jax.random.key(5)], [MpmdSharding(mesh, {0, 1}, P())])
        [back] = mpmd_to_spmd_reshard(mesh, [key], [SingleDeviceSharding(jax.devices()[0])])
        np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(jax.random.key(5)))

    def test_all_ranks_on_one_device(self):
        device = jax.devices()[0]
        mesh = MpmdMesh(Mesh(np.array([device] * 4), ("stage",)), "stage")
        source = jax.device_put(jnp.arange(4.0), device)
        [there] = spmd_to_mpmd_reshard(mesh, [source], [MpmdSharding(mesh, {0, 3}, P())])
        assert source.is_deleted()
        np.testing.assert_array_equal(there, np.arange(4.0))
        [back] = mpmd_to_spmd_reshard(mesh, [there], [SingleDeviceSharding(device)])
        assert there.is_deleted()
        np.testing.assert_array_equal(back, np.arange(4.0))

    def test_an_empty_tree(self):
        assert spmd_to_mpmd_reshard(make_mesh(), {}, {}) == {}
        assert mpmd_to_spmd_reshard(make_mesh(), [], []) == []


class TestDonation:
    def test_numpy_arrays_stay_the_users_own(self):
        mesh = make_mesh()
        x = np.ones(1 << 20, np.float32)
        [there] = spmd_to_mpmd_reshard(mesh, [x], [MpmdSharding(mesh, {0}, P())])
        x[:] = 2
        np.testing.assert_array_equal(there, np.ones(1 << 20))

    def test_sources_go_by_default_even_where_one_is_passed_twice(self):
        mesh = make_mesh()
        x = on(mesh, P("fsdp"), np.arange(8.0, dtype=np.float32))
        a, b = spmd_to_mpmd_reshard(mesh, [x, x], MpmdSharding(mesh, {0}, P("fsdp")))
        assert x.is_deleted()
        np.testing.assert_array_equal(a, np.arange(8.0))
        np.testing.assert_array_equal(b, np.arange(8.0))

    def test_sources_stay_on_request(self):
        mesh = make_mesh()
        x = on(mesh, P(), np.arange(8.0, dtype=np.float32))
        [there] = spmd_to_mpmd_reshard(mesh, [x], [MpmdSharding(mesh, {0}, P())], donate=False)
        [back] = mpmd_to_spmd_reshard(mesh, [there], [NamedSharding(mesh.jax_mesh, P())], donate=False)
        there.delete()
        np.testing.assert_array_equal(x, np.arange(8.0))
        np.testing.assert_array_equal(back, np.arange(8.0))


class TestMemory:
    def test_no_more_than_one_leaf_is_in_memory_twice(self, monkeypatch: pytest.MonkeyPatch):
        mesh = make_mesh()
        leaves = [on(mesh, P("fsdp"), np.full(1024, i, np.float32)) for i in range(16)]
        before = sum(leaf.nbytes for leaf in leaves)
        peak: list[int] = []
        made: list[int] = []
        copy = reshard.place

        def watched(value: jax.Array, to: Any, *, may_alias: bool) -> jax.Array:
            result = copy(value, to, may_alias=may_alias)
            made.append(result.nbytes)
            peak.append(sum(leaf.nbytes for leaf in leaves if not leaf.is_deleted()) + sum(made))
            return result

        monkeypatch.setattr(reshard, "place", watched)
        spmd_to_mpmd_reshard(mesh, leaves, MpmdSharding(mesh, {1}, P("fsdp")))
        assert max(peak) == before + 4096


class TestErrors:
    def test_trees_that_do_not_fit(self):
        mesh = make_mesh()
        sharding = MpmdSharding(mesh, {0}, P())
        with pytest.raises(ValueError, match="spmd_to_mpmd_reshard: the tree of shardings does not fit"):
            spmd_to_mpmd_reshard(mesh, {"a": jnp.ones(2)}, {"b": sharding})
        with pytest.raises(ValueError, match="mpmd_to_spmd_reshard: the tree of shardings does not fit"):
            mpmd_to_spmd_reshard(mesh, [jnp.ones(2)], [SingleDeviceSharding(jax.devices()[0])] * 2)

    def test_wrong_leaves(self):
        mesh = make_mesh()
        sharding = MpmdSharding(mesh, {0}, P())
        with pytest.raises(TypeError, match=r"leaf \['a'\]\['b'\] is a str, not an array"):
            spmd_to_mpmd_reshard(mesh, {"a": {"b": "text"}}, sharding)
        with pytest.raises(TypeError, match=r"sharding of leaf \[0\] is a NamedSharding; pass an `MpmdSharding"):
            spmd_to_mpmd_reshard(mesh, [jnp.ones(2)], [NamedSharding(mesh.jax_mesh, P())])
        with pytest.raises(TypeError, match=r"leaf \[0\] is a ArrayImpl, not an MpmdArray"):
            mpmd_to_spmd_reshard(mesh, [jnp.ones(2)], [NamedSharding(mesh.jax_mesh, P())])
        placed = spmd_to_mpmd_reshard(mesh, [jnp.ones(2)], [sharding])
        with pytest.raises(TypeError, match=r"sharding of leaf \[0\] is a .*; pass a"):
            mpmd_to_spmd_reshard(mesh, placed, [P()])

    def test_another_mesh(self):
        other = mesh_of(2)
        with pytest.raises(ValueError, match=r"leaf \['a'\] is over MpmdMesh\(\{'stage': 2\}.*not over the given"):
            spmd_to_mpmd_reshard(make_mesh(), {"a": jnp.ones(2)}, MpmdSharding(other, {0}, P()))

    def test_a_spec_that_does_not_divide_the_leaf(self):
        mesh = make_mesh()
        with pytest.raises(ValueError, match=r"leaf \['w'\] of shape \(3,\) does not fit its sharding.*"):
            spmd_to_mpmd_reshard(mesh, {"w": jnp.ones(3)}, MpmdSharding(mesh, {0}, P("fsdp")))

    def test_deleted_sources(self):
        mesh = make_mesh()
        [x] = spmd_to_mpmd_reshard(mesh, [jnp.ones(2)], [MpmdSharding(mesh, {0}, P())])
        x.delete()
        with pytest.raises(RuntimeError, match=r"leaf \['w'\], float32\[2\], has been donated or deleted"):
            mpmd_to_spmd_reshard(mesh, {"w": x}, NamedSharding(mesh.jax_mesh, P()))
        y = jnp.ones(2)
        y.delete()
        with pytest.raises(RuntimeError, match=r"leaf \[0\], float32\[2\], has been donated or deleted"):
            spmd_to_mpmd_reshard(mesh, [y], [MpmdSharding(mesh, {0}, P())])


@pytest.mark.processes
def test_two_processes():
    """Each owns one rank of two devices; both hold what they should, and get the whole back."""
    for output in run_processes(2, "run_reshard.py", devices=2):
        assert output.strip().endswith("good")
