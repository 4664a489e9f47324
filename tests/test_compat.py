"""The private names of JAX and their public fallbacks: both give the same results."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import _compat
from jaxpp_flax._compat import copy_arrays, copy_arrays_public, private_names_in_use
from jaxpp_flax._compat_processes import coordination

both_ways = pytest.mark.parametrize("copy", [copy_arrays, copy_arrays_public], ids=["private", "public"])
Copy = Callable[..., list[jax.Array]]


def submesh(rank: int) -> Mesh:
    return Mesh(np.array(jax.devices()[2 * rank : 2 * rank + 2]), ("data",))


def test_the_private_names_exist_in_this_jax():
    assert private_names_in_use() == {
        "array_type": True,
        "batched_copy": True,
        "coordination": True,
        "coordination_service": True,
        "copies_of_executables": True,
        "described_devices": True,
        "device_primitives": True,
        "ordered_effects": True,
        "trace_context": True,
    }


@both_ways
@pytest.mark.parametrize("number", [0, 1, 4, 16])
def test_values_and_shardings(copy: Copy, number: int):
    source, target = NamedSharding(submesh(0), P("data")), NamedSharding(submesh(1), P("data"))
    arrays = [jax.device_put(jnp.arange(8.0) + i, source) for i in range(number)]
    copies = copy(arrays, [target] * number)
    assert isinstance(copies, list)
    for i, array in enumerate(copies):
        assert array.sharding == target
        assert array.committed
        np.testing.assert_array_equal(array, np.arange(8.0) + i)


@both_ways
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_dtypes_and_shapes(copy: Copy, dtype: str, shape: tuple[int, ...]):
    value = jnp.ones(shape, dtype)
    [result] = copy([value], [SingleDeviceSharding(jax.devices()[3])])
    assert (result.dtype, result.shape, result.devices()) == (value.dtype, shape, {jax.devices()[3]})
    np.testing.assert_array_equal(result, value)


@both_ways
def test_a_copy_of_an_uncommitted_array_stays_on_its_device(copy: Copy):
    first, second = (SingleDeviceSharding(device) for device in jax.devices()[:2])
    for source in (jnp.uint32(3), jnp.arange(4), jax.random.key(3)):
        [there] = copy([source], [second])
        assert there.committed
        assert there[None].sharding == second  # JAX takes the first device for what is not committed
        assert copy([there], [first])[0].committed


@both_ways
def test_a_differently_partitioned_target_is_resharded(copy: Copy):
    arrays = [
        jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(submesh(0), spec)) for spec in (P("data"), P())
    ]
    targets = [NamedSharding(submesh(1), P(None, "data")), NamedSharding(submesh(1), P())]
    copies = copy(arrays, targets)
    assert [array.sharding for array in copies] == targets
    for array in copies:
        np.testing.assert_array_equal(array, np.arange(8.0).reshape(4, 2))
    assert [s.data.shape for s in copies[0].addressable_shards] == [(4, 1), (4, 1)]


@both_ways
def test_more_devices_than_the_source_has(copy: Copy):
    [result] = copy([jnp.arange(4.0)], [NamedSharding(submesh(2), P("data"))])
    np.testing.assert_array_equal(result, np.arange(4.0))
    assert len(result.devices()) == 2


@both_ways
def test_prng_keys_and_memory_kinds_in_one_batch(copy: Copy):
    target = SingleDeviceSharding(jax.devices()[2])
    host = SingleDeviceSharding(jax.devices()[2], memory_kind="pinned_host")
    key, plain, pinned = copy([jax.random.key(3), jnp.arange(3), jnp.arange(3)], [target, target, host])
    assert key.dtype == jax.random.key(0).dtype
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
    assert (plain.sharding.memory_kind, pinned.sharding.memory_kind) == (target.memory_kind, "pinned_host")
    np.testing.assert_array_equal(plain, pinned)


def test_arrays_that_a_compiled_function_sharded_take_the_fast_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "copy_arrays_public", lambda *_, **__: pytest.fail("took the slow way"))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(submesh(0), P("data")))
    [result] = copy_arrays([jax.jit(lambda x: x + 1)(x)], [NamedSharding(submesh(1), P("data"))])
    np.testing.assert_array_equal(result, np.arange(8.0) + 1)


# Sizes on both sides of what XLA's CPU backend copies inline, or could alias.
@both_ways
@pytest.mark.parametrize("size", [4, 1 << 20])
@pytest.mark.parametrize("same_device", [False, True])
@pytest.mark.parametrize("end", ["delete", "donate"])
def test_the_source_may_go_at_once(copy: Copy, size: int, same_device: bool, end: str):
    consume = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    target = SingleDeviceSharding(jax.devices()[0 if same_device else 1])
    for attempt in range(5):
        source = jax.device_put(jnp.full(size, attempt, jnp.float32), jax.devices()[0])
        [result] = copy([source], [target])
        if end == "delete":
            source.delete()
        else:
            consume(source).block_until_ready()
            assert source.is_deleted()
        assert result is not source
        np.testing.assert_array_equal(result, np.full(size, attempt, np.float32))


SPECS = [P(), P("data"), P(None, "data")]


@both_ways
@pytest.mark.parametrize("kind", ["float32", "key"])
@pytest.mark.parametrize("before", SPECS)
@pytest.mark.parametrize("after", SPECS)
@pytest.mark.parametrize("devices", [slice(0, 2), slice(1, 3), slice(0, 4), slice(0, 1)])
def test_the_source_may_go_where_some_devices_stay(copy: Copy, kind: str, before: P, after: P, devices: slice):
    def value() -> jax.Array:
        return jnp.arange(64.0).reshape(8, 8) if kind == "float32" else jax.random.split(jax.random.key(0), (8, 8))

    source = jax.device_put(value(), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), before))
    [result] = copy([source], [NamedSharding(Mesh(np.array(jax.devices()[devices]), ("data",)), after)])
    source.delete()
    assert jnp.array_equal(jax.device_put(result, jax.devices()[7]), jax.device_put(value(), jax.devices()[7]))


@both_ways
def test_the_copy_may_go_while_the_source_stays(copy: Copy):
    source = jax.device_put(jnp.arange(1024.0), jax.devices()[0])
    [result] = copy([source], [SingleDeviceSharding(jax.devices()[0])])
    jax.jit(lambda x: x * 0, donate_argnums=0)(result).block_until_ready()
    np.testing.assert_array_equal(source, np.arange(1024.0))


@both_ways
def test_a_deleted_source_is_an_error_not_a_crash(copy: Copy):
    array = jnp.arange(3.0)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        copy([jnp.ones(2), array], [SingleDeviceSharding(jax.devices()[1])] * 2)


@both_ways
def test_lengths_must_agree(copy: Copy):
    with pytest.raises(ValueError, match=r"got 1 arrays and 2 shardings"):
        copy([jnp.ones(2)], [SingleDeviceSharding(jax.devices()[1])] * 2)


def test_without_the_private_copy_the_public_one_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "_batched_copy", None)
    calls: list[int] = []
    public = copy_arrays_public

    def counted(*args: Any, **kwargs: Any) -> list[jax.Array]:
        calls.append(1)
        return public(*args, **kwargs)

    monkeypatch.setattr(_compat, "copy_arrays_public", counted)
    [result] = copy_arrays([jnp.arange(3)], [SingleDeviceSharding(jax.devices()[1])])
    assert calls == [1]
    np.testing.assert_array_equal(result, np.arange(3))


class Boxed:
    """A type that stands for an array, as MpmdArray does."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array


def test_a_registered_type_is_an_argument_of_jit():
    assert _compat.register_array_type(Boxed, lambda box: jax.typeof(box.array), lambda box: box.array)
    assert float(jax.jit(jnp.sum)(Boxed(jnp.arange(4.0)))) == 6.0


def test_registering_reports_when_it_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "_aval_mappings", None)
    assert not _compat.register_array_type(Boxed, lambda box: box, lambda box: box)


def test_a_described_device_without_the_private_name(monkeypatch: pytest.MonkeyPatch):
    attached, unknown = jax.devices()[0], SimpleNamespace(platform="no such platform", client=SimpleNamespace())
    assert not _compat.is_described(attached)
    monkeypatch.setattr(_compat, "_compile_only_client", None)
    assert not _compat.is_described(attached)
    assert _compat.is_described(unknown)


def test_a_program_is_lowered_for_cuda_where_a_device_says_gpu():
    assert _compat.platform_of(SimpleNamespace(platform="gpu", client=SimpleNamespace(_raw_platform="cuda"))) == "cuda"
    assert _compat.platform_of(SimpleNamespace(platform="tpu", client=SimpleNamespace())) == "tpu"


def test_without_private_names_every_other_feature_says_that_it_is_not_there(monkeypatch: pytest.MonkeyPatch):
    for name in ("_distributed_state", "_runtime", "_xla_bridge", "_detect_cluster"):
        monkeypatch.setattr(_compat, name, None)
    monkeypatch.setenv("SLURM_JOB_ID", "3")  # JAX would look further
    assert _compat.coordination_client() is None
    assert _compat.coordinator_address() is None
    assert coordination.start_coordination_service("127.0.0.1:0", 2) is None
    assert not coordination.outlive_broken_connections(1)
    assert _compat.detect_cluster(1) is None
    assert not _compat.bind_cpu_collectives("127.0.0.1")
    assert "one process" in str(_compat.why_one_process())


def test_a_connection_is_poisoned_only_by_the_private_name():
    calls: list[int] = []
    connection = SimpleNamespace(_poison_connection=lambda: calls.append(1))
    assert _compat.poison(connection)
    assert not _compat.poison(SimpleNamespace())
    assert calls == [1]


@pytest.mark.parametrize("listed", [True, False])
def test_primitives_whose_lowering_needs_devices(monkeypatch: pytest.MonkeyPatch, listed: bool):
    if not listed:
        monkeypatch.setattr(_compat, "_device_primitives", frozenset())
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    sines = jax.make_jaxpr(lambda x: jnp.sin(jax.pure_callback(np.sin, shape, x)))(shape).eqns
    assert [_compat.needs_devices(equation.primitive) for equation in sines] == [True, False]


@pytest.mark.parametrize("listed", [True, False])
def test_side_effects_that_keep_their_order(monkeypatch: pytest.MonkeyPatch, listed: bool):
    if not listed:
        monkeypatch.setattr(_compat, "_ordered_effects", None)

    def effects(ordered: bool) -> list[Any]:
        def calls(x: jax.Array) -> jax.Array:
            jax.debug.print("{}", x, ordered=ordered)
            return io_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=ordered)

        return [effect for equation in jax.make_jaxpr(calls)(1.0).eqns for effect in equation.effects]

    for ordered in (True, False):
        assert [_compat.is_ordered(effect) for effect in effects(ordered)] == [ordered] * 2
