"""Free memory: devices with their own, and devices of the CPU that share the host's."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxpp_flax.engine.arrays import device_memory
from jaxpp_flax.engine.arrays.device_memory import free_bytes, shortage


class Device:
    platform, process_index = "gpu", 0

    def __init__(self, statistics: dict[str, int] | None):
        self._statistics = statistics

    def memory_stats(self) -> dict[str, int] | None:
        return self._statistics


def test_a_device_tells_its_own_memory_or_nothing():
    assert free_bytes(Device({"bytes_limit": 10, "bytes_in_use": 4})) == 6
    assert free_bytes(Device(None)) is None
    small, silent = Device({"bytes_limit": 10}), Device(None)
    assert shortage({small: 10, silent: 1 << 60}) is None
    assert shortage({small: 11}) == (small, 11, 10)


def test_a_device_that_is_only_described_has_none(monkeypatch: pytest.MonkeyPatch):
    described = Device({"bytes_limit": 10})
    monkeypatch.setattr(device_memory, "is_described", lambda device: device is described)
    assert free_bytes(described) is None
    assert shortage({described: 11}) is None


def test_devices_of_the_cpu_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch):
    one, two = jax.devices()[:2]
    assert (free_bytes(one) or 1) > 0
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 100)
    assert shortage({one: 60, two: 40}) is None
    found: Any = shortage({one: 60, two: 41})
    assert found == (one, 101, 100)
