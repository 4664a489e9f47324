"""Copies of arrays with other shardings: the bits, the bytes that cross devices, and memory of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.engine.runtime.relayout import is_attached, relayout
from jaxpp_flax.engine.runtime.transport import routes
from tests.helpers import slow

AXES = "ab"


def random_spec(rng: np.random.Generator, sizes: dict[str, int], shape: tuple[int, ...]) -> P:
    """Each axis of the mesh divides a dimension at random, or none."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis, size in sizes.items():
        dim = int(rng.integers(-1, len(shape)))
        taken = np.prod([sizes[a] for a in dims[dim]], dtype=int) if dim >= 0 else 1
        if dim >= 0 and shape[dim] % (taken * size) == 0:
            dims[dim].append(axis)
    return P(*(tuple(axes) or None for axes in dims))


def random_layouts(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[MpmdSharding, NamedSharding]:
    """Ranks of a mesh as a trainer has them, and a mesh of any devices of the process."""
    ranks, inside = [(1, 4), (2, 2), (4, 1), (4, 2)][rng.integers(4)]
    devices = rng.permutation(jax.devices())
    mesh = MpmdMesh(Mesh(devices[: ranks * inside].reshape(ranks, inside), ("stage", "fsdp")), "stage")
    holding = {int(rank) for rank in rng.choice(ranks, rng.integers(1, min(ranks, 2) + 1), replace=False)}
    source = MpmdSharding(mesh, holding, random_spec(rng, {"fsdp": inside}, shape))
    sizes = [(1, 1), (2, 1), (1, 3), (2, 2), (2, 4)][rng.integers(5)]
    target = Mesh(rng.permutation(jax.devices())[: sizes[0] * sizes[1]].reshape(sizes), tuple(AXES))
    return source, NamedSharding(target, random_spec(rng, dict(zip(AXES, sizes, strict=True)), shape))


def lacking(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> int:
    """The elements that the devices of the target need and do not have, counted one by one."""
    held = source.devices_indices_map(shape)
    count = 0
    for device, index in target.devices_indices_map(shape).items():
        needed = np.zeros(shape, bool)
        needed[index] = True
        if device in held:
            needed[held[device]] = False
        count += int(needed.sum())
    return count


def crossing(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: Any) -> int:
    """The elements that a transfer copies from one device to another."""
    route = routes.plan((routes.SentLeaf(shape, dtype, source, target),), jax.process_index())
    assert not route.parcels
    return sum(
        np.prod([stop - start for start, stop in hop.piece], dtype=int) * sum(to != hop.source for to in hop.targets)
        for hop in route.local
    )


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("seeds", [range(12), slow(range(12, 200))])
def test_random_layouts(seeds: range, shares_memory: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "_share_memory", lambda devices: shares_memory)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        shape = [(8, 12), (24,), (4, 6, 2), (), (0, 4), (3, 5)][rng.integers(6)]
        dtype = [np.float32, jnp.bfloat16, np.int8][rng.integers(3)]
        source, target = random_layouts(rng, shape)
        value = rng.integers(-9, 9, shape).astype(dtype)
        array = place_on_ranks(value, source).as_jax_array()
        copy = relayout(array, target)
        assert (copy.sharding, copy.dtype, copy.shape) == (target, dtype, shape), seed
        for shard in copy.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index], err_msg=str(seed))
        assert crossing(array.sharding, target, shape, dtype) == lacking(array.sharding, target, shape), seed
        # A copy has memory of its own, on the same devices too.
        theirs = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards if value.size}
        assert theirs.isdisjoint(shard.data.unsafe_buffer_pointer() for shard in copy.addressable_shards if value.size)


def test_the_source_can_be_donated_afterwards():
    """A view that lived on would make XLA copy the state of the next step, so memory would grow."""
    array = jax.device_put(jnp.arange(1024.0), SingleDeviceSharding(jax.devices()[0]))
    array = array + 0  # memory of JAX
    copy = relayout(array, SingleDeviceSharding(jax.devices()[1]))
    before = array.unsafe_buffer_pointer()
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert after.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(copy, np.arange(1024.0))


def test_keys_and_memory_of_the_host():
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), NamedSharding(mesh, P("a")))
    there = relayout(keys, SingleDeviceSharding(jax.devices()[5]))
    np.testing.assert_array_equal(jax.random.key_data(there), jax.random.key_data(keys))
    on_host = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    for source, target in ((NamedSharding(mesh, P()), on_host), (on_host, NamedSharding(mesh, P()))):
        copy = relayout(jax.device_put(np.arange(6), source), target)
        assert copy.sharding == target
        np.testing.assert_array_equal(copy, np.arange(6))


def test_devices_of_this_job():
    assert all(map(is_attached, jax.devices()))
