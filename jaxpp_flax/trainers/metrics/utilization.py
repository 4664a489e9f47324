"""The share of the devices' peak speed that a run's useful operations take (model FLOP utilisation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpp_flax.planning import device_named

__all__ = ["peak_flops"]

# By JAX's name of a device's kind: its row in the table of devices, or its dense operations a second in bfloat16
# (float16 where it has no bfloat16), as the vendor's data sheet gives them. A name is matched by its beginning, the
# longer one of two.
_PEAKS: dict[str, str | float] = {
    "NVIDIA B200": "b200",
    "NVIDIA GH200": "h200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": "h100-sxm",
    "NVIDIA L4": 121e12,
    "NVIDIA A100": "a100-80",
    "Tesla V100": 125e12,
    "AMD Instinct MI300X": "mi300x",
    "TPU v4": 275e12,
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
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
    found = _PEAKS[max(names, key=len)] if names else None
    return device_named(found).peak_of("bfloat16") if isinstance(found, str) else found
