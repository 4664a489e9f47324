"""MpmdArray: a good citizen among arrays."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from tests.engine.toys import mesh_of
from tests.helpers import slow


def stage_data(axis_type: AxisType = AxisType.Auto) -> MpmdMesh:
    return mesh_of(4, axis_type, data=2)


def make(value: Any, ranks: tuple[int, ...] = (1,), spec: P | None = None, mesh: MpmdMesh | None = None) -> MpmdArray:
    sharding = MpmdSharding(mesh or stage_data(), ranks, P() if spec is None else spec)
    return MpmdArray({rank: jax.device_put(value, sharding.local_sharding(rank)) for rank in ranks}, sharding)


def elsewhere(shape: tuple[int, ...] = (3,)) -> MpmdArray:
    """As if the array's rank belonged to another process."""
    return MpmdArray([], MpmdSharding(stage_data(), {2}, P()), shape=shape, dtype=jnp.dtype("float32"))


VALUE = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_attributes():
    x = make(VALUE, (0, 2), P("data"))
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((4, 2), jnp.float32, 2, 8, 32)
    assert (x.mpmd_idxs, x.spec, x.sharding.mesh_ids) == ((0, 2), P("data"), frozenset({0, 2}))
    assert x.is_mpmd_replicated
    assert x.is_partially_addressable
    assert x.is_fully_addressable
    assert list(x._partially_addressable_arrays) == [0, 2]
    assert not make(VALUE).is_mpmd_replicated
    assert x.aval.shape == (4, 2)
    assert not x.weak_type


def test_the_fast_constructor_gives_the_same():
    x = make(VALUE, (1, 3), P("data"))
    fast = MpmdArray._from_parts(x.sharding, x._partially_addressable_arrays, x.aval)
    assert repr(fast) == repr(x)
    np.testing.assert_array_equal(fast, x)
    assert not hasattr(fast, "__dict__")


def test_local_arrays_by_rank():
    x = make(VALUE, (0, 2), P("data"))
    local = x.to_mpmd_local_array
    assert isinstance(local, list)
    assert [array.sharding.mesh for array in local] == [x.sharding.mpmd_mesh.unstack[rank] for rank in (0, 2)]
    assert x.first_mpmd_replica is local[0]
    alone = make(VALUE, (2,))
    assert alone.to_mpmd_local_array is alone.first_mpmd_replica


def test_the_ranks_of_a_sequence_are_told_by_the_devices():
    mesh = stage_data()
    sharding = MpmdSharding(mesh, {1, 3}, P("data"))
    parts = [jax.device_put(VALUE, sharding.local_sharding(rank)) for rank in (3, 1)]
    x = MpmdArray(parts, sharding)
    assert list(x._partially_addressable_arrays) == [1, 3]
    # JaxPP's submeshes keep the ranks' axis.
    kept = jax.device_put(VALUE, NamedSharding(mesh.mpmd_submesh([1]).jax_mesh, P("data")))
    np.testing.assert_array_equal(MpmdArray([kept], MpmdSharding(mesh, {1}, P("data"))), VALUE)


def test_several_ranks_on_one_device():
    mesh = MpmdMesh(Mesh(np.array([jax.devices()[0]] * 4), ("stage",)), "stage")
    x = make(VALUE, (0, 1, 3), mesh=mesh)
    assert x.mpmd_idxs == (0, 1, 3)
    assert len(x._partially_addressable_arrays) == 3
    y = MpmdArray(list(x._partially_addressable_arrays.values()), x.sharding)
    assert list(y._partially_addressable_arrays) == [0, 1, 3]
    np.testing.assert_array_equal(x.as_jax_array(), VALUE)
    np.testing.assert_array_equal(jax.jit(lambda a: a + 1)(x), VALUE + 1)


class TestErrors:
    def test_wrong_devices(self):
        sharding = MpmdSharding(stage_data(), {1}, P())
        with pytest.raises(ValueError, match=r"array 0, float32\[4,2\] on .*none of the ranks \(1,\).*local_sharding"):
            MpmdArray([jax.device_put(VALUE, jax.devices()[0])], sharding)

    def test_rank_outside_of_the_sharding(self):
        sharding = MpmdSharding(stage_data(), {1}, P())
        with pytest.raises(ValueError, match=r"rank 0; its sharding has the ranks \(1,\)"):
            MpmdArray({0: jnp.ones(2)}, sharding)

    def test_wrong_spec(self):
        sharding = MpmdSharding(stage_data(), {1}, P("data"))
        part = jax.device_put(VALUE, NamedSharding(sharding.mpmd_mesh.unstack[1], P()))
        with pytest.raises(ValueError, match=r"rank 1, float32\[4,2\], is sharded as .*asks for .*device_put"):
            MpmdArray([part], sharding)

    def test_differing_shapes_and_dtypes(self):
        sharding = MpmdSharding(stage_data(), {0, 1}, P())
        parts = {0: jnp.ones(2), 1: jnp.ones(3)}
        parts = {rank: jax.device_put(part, sharding.local_sharding(rank)) for rank, part in parts.items()}
        with pytest.raises(ValueError, match=r"rank 1 is float32\[3\], the whole one is float32\[2\]"):
            MpmdArray(parts, sharding)

    def test_no_local_array_and_no_type(self):
        with pytest.raises(ValueError, match=r"ranks \(2,\) got no local array.*pass `shape` and `dtype`"):
            MpmdArray([], MpmdSharding(stage_data(), {2}, P()))

    @pytest.mark.parametrize("donated", [True, False])
    def test_use_after_donation(self, donated: bool):
        x = make(VALUE)
        if donated:
            jax.jit(lambda a: a + 1, donate_argnums=0)(x.to_mpmd_local_array)
        else:
            x.delete()
        assert x.is_deleted()
        uses = (
            np.asarray, jnp.asarray, lambda x: x + 1, lambda x: x[0], jax.jit(lambda x: x), lambda x: x.sum(),
            lambda x: x.as_jax_array(), lambda x: x.to_mpmd_local_array, lambda x: x.first_mpmd_replica,
            copy.deepcopy, pickle.dumps,
        )  # fmt: skip
        for use in uses:
            with pytest.raises(
                RuntimeError, match=r"float32\[4,2\] on rank 1 has been deleted: it was donated.*jnp.copy"
            ):
                use(x)
        assert "deleted" in repr(x)

    def test_use_of_an_array_of_another_process(self):
        with pytest.raises(RuntimeError, match=r"float32\[3\] has no values in process 0: it lives on rank 2.*reshard"):
            np.asarray(elsewhere())

    def test_unknown_attribute(self):
        with pytest.raises(AttributeError, match="MpmdArray has no attribute 'foo'"):
            _ = make(VALUE).foo
        assert not hasattr(make(VALUE), "addressable_shards")


def test_an_array_of_another_process():
    x = elsewhere()
    assert (x.shape, x.dtype, x.mpmd_idxs) == ((3,), jnp.float32, (2,))
    assert not x.is_partially_addressable
    assert x.to_mpmd_local_array is None
    assert x.first_mpmd_replica is None
    assert not x.is_deleted()
    x.delete()
    assert x.block_until_ready() is x
    assert repr(x) == f"MpmdArray(shape=(3,), dtype=float32, mpmd_idxs=(2,), sharding={x.sharding.sharding})"


def test_deleting_twice_and_in_part():
    x = make(VALUE, (0, 2))
    x._partially_addressable_arrays[2].delete()
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(x), VALUE)  # the first replica is still there
    x.delete()
    x.delete()
    assert x.is_deleted()


class TestNumpyAndPython:
    def test_asarray(self):
        x = make(VALUE, (1,), P("data"))
        np.testing.assert_array_equal(np.asarray(x), VALUE)
        assert np.asarray(x, np.float64).dtype == np.float64
        assert np.array(x).flags.writeable
        assert np.array(x, copy=True).flags.writeable
        np.testing.assert_array_equal(np.ones((4, 2), np.float32) + x, VALUE + 1)
        np.testing.assert_allclose(x, VALUE)

    def test_scalars(self):
        x = make(np.float32(2.5))
        assert (float(x), int(x), bool(x), complex(x)) == (2.5, 2, True, 2.5 + 0j)
        assert f"{x:.3f}" == "2.500"
        assert f"{x}" == "2.5"
        assert x.item() == 2.5
        i = make(np.int32(3))
        assert operator.index(i) == 3
        assert list(range(5))[i] == 3
        assert round(x) == 2

    def test_sequences(self):
        x = make(VALUE)
        assert len(x) == 4
        np.testing.assert_array_equal(x[1], VALUE[1])
        np.testing.assert_array_equal(x[1:, 0], VALUE[1:, 0])
        np.testing.assert_array_equal(np.stack(list(x)), VALUE)
        with pytest.raises(TypeError, match="len"):
            len(make(np.float32(1)))

    def test_methods(self):
        x = make(VALUE)
        assert float(x.mean()) == VALUE.mean()
        assert x.astype(jnp.int32).dtype == jnp.int32
        np.testing.assert_array_equal(x.T, VALUE.T)
        np.testing.assert_array_equal(x.at[0].set(0), np.concatenate([[[0, 0]], VALUE[1:]]))

    def test_repr(self):
        x = make(np.zeros(100, np.float32), (0, 1), P("data"))
        # What JaxPP documents: the plain sharding over the mesh of the array's ranks.
        plain = NamedSharding(x.sharding.mpmd_mesh.mpmd_submesh([0, 1]).jax_mesh, P("data"))
        assert repr(x) == f"MpmdArray(shape=(100,), dtype=float32, mpmd_idxs=(0, 1), sharding={plain})"
        assert "Mesh('stage': 2, 'data': 2" in repr(x)
        assert f"{x}" == str(x) == repr(x)
        x.delete()
        assert repr(x).endswith(", deleted)")
        assert "dtype=key<fry>" in repr(make(jax.random.key(0)))

    def test_pickling_gives_numpy(self):
        loaded = pickle.loads(pickle.dumps({"w": make(VALUE, (1,), P("data")), "b": make(jnp.ones(2, jnp.bfloat16))}))
        assert type(loaded["w"]) is np.ndarray
        np.testing.assert_array_equal(loaded["w"], VALUE)
        assert loaded["b"].dtype == jnp.bfloat16
        with pytest.raises(RuntimeError, match="has no values in process 0"):
            pickle.dumps(elsewhere())
        with pytest.raises(TypeError, match="pickle their key_data"):
            pickle.dumps(make(jax.random.key(0)))

    def test_copies_stay_on_their_ranks(self):
        x = make(VALUE, (0, 2), P("data"))
        deep = copy.deepcopy({"x": x})["x"]
        x.delete()
        assert deep.mpmd_idxs == (0, 2)
        np.testing.assert_array_equal(deep, VALUE)
        shallow = copy.copy(deep)
        deep.delete()
        assert shallow.is_deleted()


class TestOperators:
    def test_binary(self):
        """Each on two of them; and one, in which sides differ, with everything that may stand on either side."""
        x, y = make(VALUE + 1, (1,)), make(VALUE + 2, (1,))
        names = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge")
        for op in (getattr(operator, name) for name in names):
            np.testing.assert_allclose(op(x, y), op(VALUE + 1, VALUE + 2), rtol=1e-6, err_msg=op.__name__)
            np.testing.assert_allclose(op(2, x), op(np.float32(2), VALUE + 1), rtol=1e-6, err_msg=op.__name__)
        for result in (x - (VALUE + 2), VALUE + 1 - y, x - y.first_mpmd_replica, x.first_mpmd_replica - y):
            np.testing.assert_array_equal(result, VALUE * 0 - 1)
        np.testing.assert_array_equal(x - 2, VALUE - 1)

    def test_others(self):
        x, i = make(VALUE), make(np.array([5, 3], np.int32))
        np.testing.assert_array_equal(-x, -VALUE)
        np.testing.assert_array_equal(+x, VALUE)
        np.testing.assert_array_equal(abs(-1 * x), VALUE)
        np.testing.assert_array_equal(~i, [~5, ~3])
        np.testing.assert_array_equal(x @ VALUE.T, VALUE @ VALUE.T)
        np.testing.assert_array_equal((i & 1) | (i << 1) ^ (i >> 1), (5 & 1 | 10 ^ 2, 3 & 1 | 6 ^ 1))
        np.testing.assert_array_equal(divmod(i, 2), ([2, 1], [1, 1]))

    def test_operands_meet_on_a_common_rank(self):
        x, y = make(VALUE, (0, 2)), make(VALUE, (2, 3))
        assert (x * y).devices() == set(x.sharding.mpmd_mesh.rank_devices(2))
        assert (x * y.to_mpmd_local_array[0]).devices() == set(x.sharding.mpmd_mesh.rank_devices(2))

    def test_no_hash_because_equality_is_by_element(self):
        with pytest.raises(TypeError, match="unhashable"):
            hash(make(VALUE))


class TestJax:
    def test_is_one_leaf_of_a_tree(self):
        tree = {"a": make(VALUE), "b": [make(VALUE, (2,))]}
        assert len(jax.tree.leaves(tree)) == 2
        sums = jax.tree.map(jnp.sum, tree)
        assert float(sums["a"]) == VALUE.sum()
        scaled = jax.tree.map(lambda p, g: p - 0.1 * g, tree, tree)  # what optax.apply_updates and the like do
        np.testing.assert_allclose(scaled["b"][0], VALUE * 0.9, rtol=1e-6)
        zeros = jax.tree.map(jnp.zeros_like, tree)
        assert zeros["b"][0].devices() == set(stage_data().rank_devices(2))

    def test_device_get_and_block_until_ready(self):
        tree = {"a": make(VALUE, (0, 1), P("data"))}
        host = jax.device_get(tree)["a"]
        assert type(host) is np.ndarray
        np.testing.assert_array_equal(host, VALUE)
        assert jax.block_until_ready(tree)["a"] is tree["a"]

    @pytest.mark.parametrize(("axis_type", "ranks"), [(AxisType.Auto, (1,)), (AxisType.Explicit, (0, 2))])
    def test_as_jax_array(self, axis_type: AxisType, ranks: tuple[int, ...]):
        x = make(VALUE, ranks, P("data"), stage_data(axis_type))
        whole = x.as_jax_array()
        assert isinstance(whole, jax.Array)
        assert whole.sharding == x.sharding
        assert len(whole.addressable_shards) == 2 * len(ranks)
        np.testing.assert_array_equal(whole, VALUE)
        assert jax.typeof(x) == jax.typeof(whole)
        replica = x._partially_addressable_arrays[ranks[0]]
        pointers = {shard.data.unsafe_buffer_pointer() for shard in whole.addressable_shards}
        assert replica.addressable_shards[0].data.unsafe_buffer_pointer() in pointers

    @pytest.mark.parametrize(("axis_type", "ranks"), [(AxisType.Auto, (1,)), (AxisType.Explicit, (0, 2))])
    def test_under_transformations(self, axis_type: AxisType, ranks: tuple[int, ...]):
        x = make(VALUE, ranks, P("data"), stage_data(axis_type))
        np.testing.assert_array_equal(jax.jit(lambda a: a * 2)(x), VALUE * 2)
        with jax.set_mesh(x.sharding.mesh):  # JAX asks for it where axes are Explicit
            np.testing.assert_array_equal(jax.grad(lambda a: jnp.sum(a**2))(x), VALUE * 2)
        np.testing.assert_array_equal(jax.vmap(jnp.sum)(x), VALUE.sum(1))
        np.testing.assert_array_equal(jax.jit(lambda a: a).lower(x).compile()(x), VALUE)
        assert jax.eval_shape(lambda a: a.T, x).shape == (2, 4)
        assert jax.jit(lambda a: a + 1)(x).devices() == x.sharding.device_set
        np.testing.assert_array_equal(jnp.stack([x, x]), np.stack([VALUE, VALUE]))
        np.testing.assert_array_equal(jnp.where(True, x, 0), VALUE)
        np.testing.assert_array_equal(jax.device_put(x, jax.devices()[5]), VALUE)

    @pytest.mark.parametrize("axis_type", [slow(AxisType.Auto), AxisType.Explicit])
    def test_operators_beside_functions(self, axis_type: AxisType):
        """What an operator makes of an array of several ranks may stand beside it in a call."""
        x = make(VALUE, (0, 2), P("data"), stage_data(axis_type))
        np.testing.assert_array_equal(jnp.where(x > 3, x, 0), np.where(VALUE > 3, VALUE, 0))
        np.testing.assert_array_equal(jnp.where(x > 3, -x, x * 2), np.where(VALUE > 3, -VALUE, VALUE * 2))
        np.testing.assert_array_equal(jnp.maximum(x.mean(), x.min()), VALUE.mean())
        np.testing.assert_array_equal(jnp.minimum(x - 0.5 * x, x), VALUE / 2)

    def test_an_operation_on_arrays_that_share_no_rank(self):
        with pytest.raises(ValueError, match=r"float32\[4,2\] on rank 0, 2 and float32\[4,2\] on rank 1.*device_get"):
            make(VALUE, (0, 2)) * make(VALUE, (1,))

    def test_donating_it_to_plain_jit_marks_it_deleted(self):
        x = make(VALUE)
        jax.jit(lambda a: a + 1, donate_argnums=0)(x)
        assert x.is_deleted()

    def test_prng_keys(self):
        x = make(jax.random.key(7), (0, 1))
        np.testing.assert_array_equal(jax.random.key_data(x.as_jax_array()), jax.random.key_data(jax.random.key(7)))
        assert jax.random.bits(jnp.asarray(x)) == jax.random.bits(jax.random.key(7))
        assert x.nbytes > 0

    def test_inside_a_traced_function_as_a_constant(self):
        x = make(VALUE)
        np.testing.assert_array_equal(jax.jit(lambda a: a * x)(x), VALUE * VALUE)
