"""Damage to a checkpoint on disk, as a failing disk or a careless hand does it."""

from __future__ import annotations

import json
from pathlib import Path

from jaxpp_flax.checkpoint.format.integrity import DIGESTS

DAMAGES = ["flip", "cut_off", "delete", "empty", "remove"]
"""The last two: an empty directory of a later step, and a checkpoint that is deleted."""


def damage(step: Path, how: str, number: int) -> None:
    """Damage one of the files that have digests, chosen by `number`."""
    names = sorted(name for name, (size, _) in json.loads((step / DIGESTS).read_text()).items() if size)
    path = step / names[number % len(names)]
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "cut_off":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
