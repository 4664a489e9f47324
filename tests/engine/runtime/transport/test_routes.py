"""The plan of a transfer between devices of different processes; the devices are stand-ins with an owner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.runtime.transport import routes
from jaxpp_flax.engine.runtime.transport.base import Tag


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


class Parts:
    """A sharding that cuts the first dimension among its devices, or gives each of them all of it."""

    def __init__(self, devices: list[Device], *, cut: bool) -> None:
        self.devices, self.cut = devices, cut

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
        step = shape[0] // len(self.devices)
        return {
            d: ((slice(i * step, (i + 1) * step) if self.cut else slice(None)), *(slice(None) for _ in shape[1:]))
            for i, d in enumerate(self.devices)
        }


def hops(source: list[Device], target: list[Device], *, cut: bool) -> list[tuple[int, tuple[int, ...]]]:
    leaf: Any = routes.SentLeaf((8, 2), jnp.float32, Parts(source, cut=cut), Parts(target, cut=cut))  # type: ignore[arg-type]
    return [(h.source.id, tuple(d.id for d in h.targets)) for h in routes._hops(0, leaf)]


def devices(owners: list[int], first: int) -> list[Device]:
    return [Device(first + i, owner) for i, owner in enumerate(owners)]


def test_a_replica_crosses_once_for_each_process_and_is_copied_on():
    assert hops(devices([0, 0], 0), devices([1, 1], 2), cut=False) == [(0, (2, 3))]


def test_replicas_share_the_sending():
    assert hops(devices([0, 1], 0), devices([2, 3], 2), cut=False) == [(0, (2,)), (1, (3,))]


def test_shards_go_to_their_counterparts():
    assert hops(devices([0, 0], 0), devices([1, 1], 2), cut=True) == [(0, (2,)), (1, (3,))]


def test_what_is_in_the_process_already_is_taken_there():
    assert hops(devices([0, 1], 0), devices([1, 0], 2), cut=False) == [(1, (2,)), (0, (3,))]


def regions(source: Parts, target: Parts, shape: tuple[int, ...] = (8, 2)) -> list[tuple[int, tuple[int, ...], Any]]:
    leaf: Any = routes.SentLeaf(shape, jnp.float32, source, target)  # type: ignore[arg-type]
    return [(h.source.id, tuple(d.id for d in h.targets), h.piece[0]) for h in routes._hops(0, leaf)]


def test_each_device_gets_the_regions_that_it_needs():
    two, four = devices([0] * 2, 0), devices([1] * 4, 2)
    finer = [(i // 2, (2 + i,), (2 * i, 2 * i + 2)) for i in range(4)]
    assert regions(Parts(two, cut=True), Parts(four, cut=True)) == finer
    coarser = [(2 + i, (i // 2,), (2 * i, 2 * i + 2)) for i in range(4)]
    assert regions(Parts(four, cut=True), Parts(two, cut=True)) == coarser
    # Thirds of six rows against halves.
    three = devices([1] * 3, 2)
    found = regions(Parts(two, cut=True), Parts(three, cut=True), (6, 2))
    assert found == [(0, (2,), (0, 2)), (0, (3,), (2, 3)), (1, (3,), (3, 4)), (1, (4,), (4, 6))]


@pytest.mark.parametrize("cut", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("owners", [([0] * 2, [1] * 4), ([0] * 4, [1] * 2), ([0, 1], [1, 1, 0, 0]), ([0], [1] * 3)])
def test_nothing_crosses_twice_or_in_vain(cut: tuple[bool, bool], owners: tuple[list[int], list[int]]):
    source = Parts(devices(owners[0], 0), cut=cut[0])
    target = Parts(devices(owners[1], 10), cut=cut[1])
    leaf: Any = routes.SentLeaf((12, 2), jnp.float32, source, target)  # type: ignore[arg-type]
    needed: dict[int, set[int]] = {}
    for device, (rows, _) in target.devices_indices_map((12, 2)).items():
        needed.setdefault(device.process_index, set()).update(range(*rows.indices(12)))
    has: dict[int, set[int]] = {}
    for device, (rows, _) in source.devices_indices_map((12, 2)).items():
        has.setdefault(device.process_index, set()).update(range(*rows.indices(12)))
    crossing: dict[int, Counter[int]] = {process: Counter() for process in needed}
    for hop in routes._hops(0, leaf):
        process = hop.targets[0].process_index
        if hop.source.process_index != process:
            crossing[process].update(range(*hop.piece[0]))
    for process, rows in needed.items():
        assert crossing[process] == Counter(rows - has.get(process, set()))


def moved(array: Any, target: NamedSharding) -> Any:
    """The array by a route inside this process."""
    counted: list[None] = []
    connection: Any = SimpleNamespace(
        transport=SimpleNamespace(needs_global_order=False),
        window=SimpleNamespace(before_task=lambda: counted.append(None)),
    )
    route = routes.plan((routes.SentLeaf(array.shape, array.dtype, array.sharding, target),), 0)
    (result,) = route.move(connection, [array], [True], Tag("test", 0, 0))
    to_each = Counter(device for hop in route.local for device in hop.targets)
    assert len(counted) == sum(hop.cut is not None for hop in route.local) + sum(n > 1 for n in to_each.values())
    return result


def mesh_of(first: int, *shape: int) -> Mesh:
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape), ("a", "b")[: len(shape)])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (NamedSharding(mesh_of(0, 2), P("a")), NamedSharding(mesh_of(4, 4), P("a"))),
        (NamedSharding(mesh_of(0, 4), P("a")), NamedSharding(mesh_of(4, 2), P("a"))),
        (NamedSharding(mesh_of(0, 1, 2), P(None, "b")), NamedSharding(mesh_of(4, 2, 2), P("a", "b"))),
        (NamedSharding(mesh_of(0, 2, 2), P(("b", "a"))), NamedSharding(mesh_of(2, 2, 2), P("b"))),
        (NamedSharding(mesh_of(0, 4), P("a")), NamedSharding(mesh_of(4, 1), P())),
        (NamedSharding(mesh_of(0, 1), P()), NamedSharding(mesh_of(4, 2, 2), P("b", "a"))),
        (NamedSharding(mesh_of(0, 2), P("a")), NamedSharding(mesh_of(0, 2), P(None, "a"))),
    ],
)
def test_any_partition_becomes_any_other(source: NamedSharding, target: NamedSharding):
    rng = np.random.default_rng(0)
    values = {
        "float32": rng.normal(size=(8, 4)).astype(np.float32),
        "bool": rng.random((4, 4)) < 0.5,
        "keys": jax.random.wrap_key_data(rng.integers(0, 99, (4, 4, 2)).astype(np.uint32)),
        "empty": np.zeros((0, 4), np.int8),
    }
    for name, value in values.items():
        result = moved(jax.device_put(value, source), target)
        assert result.sharding.is_equivalent_to(target, 2), name
        for found, wanted in zip(
            result.addressable_shards, jax.device_put(value, target).addressable_shards, strict=True
        ):
            data = [jax.random.key_data(x.data) if name == "keys" else x.data for x in (found, wanted)]
            np.testing.assert_array_equal(*data, err_msg=name)


def test_ids_tell_program_call_transfer_and_direction_apart():
    ids = {
        Tag(program, 0, number, call).id(source, target)
        for program in ("a", "b")
        for call in range(20)
        for number in range(20)
        for source, target in ((0, 1), (1, 0), (0, 2))
    }
    assert len(ids) == 2 * 20 * 20 * 3
    assert all(0 <= i < 1 << 63 for i in ids)
