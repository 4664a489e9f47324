"""The message of a compiler for whose device a program is too large."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["TooLarge", "read_refusal"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AMOUNT = r"([\d.]+)([KMGT]?)i?B?"
_SHORT = re.compile(rf"required for .*?\({_AMOUNT}\) exceeds available \w+ \({_AMOUNT}\)")
_LONG = re.compile(rf"Used {_AMOUNT} of {_AMOUNT} \w+")
_BUFFER = re.compile(rf"^\s*\d+\. Size: {_AMOUNT}\s*$((?:\n(?!\s*\d+\. Size:).*)*)", re.MULTILINE)


class TooLarge(NamedTuple):
    """What a compiler says of a program that does not fit.

    Attributes:
      needed: the bytes that the program needs; None if the message does not say.
      available: the bytes that it may have; likewise.
      largest: the bytes of its largest buffers, each with a text that says what it is.
    """

    needed: float | None
    available: float | None
    largest: tuple[tuple[float, str], ...] = ()


def read_refusal(message: str) -> TooLarge | None:
    """Read the message of an error of XLA; None for another error.

    Example:
      >>> read_refusal("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
      ...              "(18.00G) exceeds available HBM (15.75G).")
      TooLarge(needed=19327352832.0, available=16911433728.0, largest=())
      >>> read_refusal("INVALID_ARGUMENT: ...") is None
      True
    """
    if "RESOURCE_EXHAUSTED" not in message or "out of memory" not in message.lower():
        return None
    found = _SHORT.search(message) or _LONG.search(message)
    needed, available = (_bytes(found[1], found[2]), _bytes(found[3], found[4])) if found else (None, None)
    return TooLarge(needed, available, tuple((_bytes(b[1], b[2]), _described(b[3])) for b in _BUFFER.finditer(message)))


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]


def _described(text: str) -> str:
    """Return the shape of a buffer and the operation that makes it, as far as its entry has them."""
    parts = [re.search(pattern, text) for pattern in (r"Shape: (\S+)", r'op_name="([^"]*)"', r"Allocation type: (.+)")]
    return ", ".join(found[1].strip() for found in parts if found)
