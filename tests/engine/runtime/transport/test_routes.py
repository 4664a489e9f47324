"""The plan of a transfer between devices of different processes; the devices are stand-ins with an owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

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
    leaf: Any = routes.Leaf((8, 2), jnp.float32, Parts(source, cut=cut), Parts(target, cut=cut))  # type: ignore[arg-type]
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


def test_ids_tell_program_step_transfer_and_direction_apart():
    ids = {
        Tag(program, step, number).id(source, target)
        for program in ("a", "b")
        for step in range(20)
        for number in range(20)
        for source, target in ((0, 1), (1, 0), (0, 2))
    }
    assert len(ids) == 2 * 20 * 20 * 3
    assert all(0 <= i < 1 << 63 for i in ids)
