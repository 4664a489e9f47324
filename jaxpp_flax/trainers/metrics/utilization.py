"""The share of the devices' peak speed that a run's useful operations take (model FLOP utilisation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpp_flax.planning.quoting.devices import peak_of_kind

__all__ = ["peak_flops"]


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Return the operations a second that devices of known kinds do at most, together; None for other kinds.

    Example:
      >>> class Card:
      ...     device_kind = "NVIDIA H100 80GB HBM3"
      >>> peak_flops([Card(), Card()]) == 2 * 989e12
      True
    """
    peaks = [peak_of_kind(str(getattr(device, "device_kind", ""))) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None
