"""Speeds that estimates assume for a platform, if nothing is measured or given: orders of magnitude."""

from __future__ import annotations

from jaxpp_flax.planning import Hardware

__all__ = ["flops_per_byte", "hardware_of"]

# Approximate FLOPs in the time to move one byte between a device's memory and its cores.
_FLOPS_PER_BYTE = {"cpu": 4.0, "gpu": 100.0, "cuda": 100.0, "rocm": 100.0, "tpu": 200.0}
_OF_AN_ACCELERATOR = 100.0

_CPU = Hardware(flops=50e9, host_bandwidth=10e9, link_bandwidth=10e9, gather_bandwidth=10e9)
# A card of 2023 on PCIe 5, beside others of its host.
_ACCELERATOR = Hardware(flops=400e12, host_bandwidth=50e9, link_bandwidth=50e9, gather_bandwidth=200e9)
_TPU = Hardware(flops=200e12, host_bandwidth=10e9, link_bandwidth=50e9, gather_bandwidth=100e9)
_HARDWARE = {"cpu": _CPU, "tpu": _TPU}


def flops_per_byte(platform: str) -> float:
    """Return the FLOPs in the time to move one byte.

    Example:
      >>> flops_per_byte("cpu")
      4.0
    """
    return _FLOPS_PER_BYTE.get(platform, _OF_AN_ACCELERATOR)


def hardware_of(platform: str) -> Hardware:
    """Return the assumed speeds of one device of a platform.

    Example:
      >>> hardware_of("gpu").host_bandwidth
      50000000000.0
    """
    return _HARDWARE.get(platform, _ACCELERATOR)
