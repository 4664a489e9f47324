"""The free memory of devices, for checks before anything is placed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxpp_flax._compat import is_described

__all__ = ["Shortage", "free_bytes", "shortage"]


class Shortage(NamedTuple):
    """A memory that is too small."""

    device: Any  # one that uses this memory
    needed: int
    free: int


def free_bytes(device: Any) -> int | None:
    """Return the free bytes of a device's memory; None if the device does not tell, or is only described.

    Devices of the CPU share theirs.

    Example:
      >>> free = free_bytes(jax.devices()[0])
      >>> free is None or free > 0
      True
    """
    if device.platform == "cpu":
        return _free_host_bytes()
    statistics = (None if is_described(device) else device.memory_stats()) or {}
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0) if "bytes_limit" in statistics else None


def _free_host_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next((line for line in lines if line.startswith("MemAvailable:")), None)
        return int(available.split()[1]) << 10 if available else None
    except OSError:  # not Linux
        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shortage(needed: Mapping[Any, int]) -> Shortage | None:
    """Return the first memory of this process that cannot take the `needed` bytes of its devices, or None."""
    pools: dict[Any, list[Any]] = {}
    for device in needed:
        if device.process_index == jax.process_index():
            pools.setdefault("host" if device.platform == "cpu" else device, []).append(device)
    for devices in pools.values():
        total, free = sum(needed[device] for device in devices), free_bytes(devices[0])
        if free is not None and total > free:
            return Shortage(max(devices, key=lambda device: needed[device]), total, free)
    return None
