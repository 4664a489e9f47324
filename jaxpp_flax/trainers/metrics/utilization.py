"""The share of the devices' peak speed that a run's useful operations take (model FLOP utilisation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["peak_flops"]

# Dense operations a second in bfloat16 (float16 where a device has no bfloat16), by JAX's name of a device's kind, as
# the vendors' data sheets give them. A name is matched by its beginning; a longer one comes before a shorter one.
_PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A100": 312e12,
    "Tesla V100": 125e12,
    "AMD Instinct MI300X": 1307e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Return the operations a second that devices of known kinds do at most, together; None for other kinds.

    Example:
      >>> class Card:
      ...     device_kind = "NVIDIA H100 80GB HBM3"
      >>> peak_flops([Card(), Card()]) == 2 * 989e12
      True
    """
    peaks = [_peak_of(str(getattr(device, "device_kind", ""))) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def _peak_of(kind: str) -> float | None:
    names = [name for name in _PEAKS if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    return _PEAKS[max(names, key=len)] if names else None
