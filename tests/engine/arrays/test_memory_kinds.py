"""The one rule for requests of memory; what steps do with them is in tests/engine/test_memory_kinds.py."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.memory_kinds import check_devices, check_kind, kinds_of, memory_wanted
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding, named_memory

MESH = Mesh(np.array(jax.devices()[:2]), ("stage",))


def test_kinds_that_types_know():
    assert [check_kind(kind, "x") for kind in ("device", "pinned_host")] == ["device", "pinned_host"]
    with pytest.raises(ValueError, match=r"^x has the memory kind 'vmem'.*'device' and 'pinned_host'"):
        check_kind("vmem", "x")
    abstract = NamedSharding(AbstractMesh((2,), ("stage",)), P(), memory_kind="unpinned_host")
    for sharding in (abstract, NamedSharding(MESH, P(), memory_kind="unpinned_host")):
        with pytest.raises(ValueError, match=r"^x .*the memory kind 'unpinned_host'"):
            memory_wanted(sharding, "x")
    assert memory_wanted(NamedSharding(MESH, P(), memory_kind="device"), "x") == "device"


def test_kinds_that_devices_have():
    assert kinds_of(jax.devices()[0]) >= {"device", "pinned_host"}
    described = SimpleNamespace()  # it does not tell, so nothing is refused
    check_devices("pinned_host", [described], "x")
    lacking = SimpleNamespace(
        addressable_memories=lambda: [SimpleNamespace(kind="device"), SimpleNamespace(kind="vmem")]
    )
    check_devices(None, [lacking], "x")
    with pytest.raises(ValueError, match=r"^x asks for the memory kind 'pinned_host', .*it has 'device', 'vmem'\. Use"):
        check_devices("pinned_host", [jax.devices()[0], lacking], "x")


def test_the_memory_that_a_sharding_names_and_shows():
    host = NamedSharding(MESH, P(), memory_kind="pinned_host")
    abstract = NamedSharding(AbstractMesh((2,), ("stage",)), P(), memory_kind="pinned_host")
    own = jax.device_put(np.ones(2)).sharding
    assert [named_memory(x) for x in (None, own, host, abstract)] == [None, None, "pinned_host", "pinned_host"]
    mesh = MpmdMesh(MESH, "stage")
    assert repr(MpmdSharding(mesh, {1}, P(), "pinned_host")).endswith(", memory_kind='pinned_host')")
    assert "memory_kind" not in repr(MpmdSharding(mesh, {1}, P()))
