"""Damage to a checkpoint on disk, as a failing disk or a careless hand does it."""

from __future__ import annotations

import json
from pathlib import Path

from jaxpp_flax.checkpoint.format.integrity import FILE_SIZES

DAMAGES = ["cut_off", "delete", "empty", "remove"]
"""The last two: an empty directory of a later step, and a checkpoint that is deleted."""


def damage(step: Path, how: str, number: int) -> None:
    """Damage one of the files that are in the list, chosen by `number`."""
    names = sorted(name for name, size in json.loads((step / FILE_SIZES).read_text()).items() if size)
    path = step / names[number % len(names)]
    if how == "delete":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
