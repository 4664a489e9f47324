"""Damage to a checkpoint on disk, as a failing disk or a careless hand does it."""

from __future__ import annotations

from pathlib import Path

from jaxpp_flax.checkpoint.format.integrity import needed_bytes

DAMAGES = ["cut_off", "delete", "empty", "remove"]
"""The last two: an empty directory of a later step, and a checkpoint that is deleted."""


def damage(step: Path, how: str, number: int) -> None:
    """Damage one of the files that a run needs to go on, chosen by `number`."""
    files = sorted(needed_files(step))
    path = files[number % len(files)]
    if how == "delete":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])


def needed_files(step: Path) -> dict[Path, int]:
    """Return the files of a step's directory that are read when a run goes on from it, with the bytes in use."""
    tree = step / "state"
    beside = [step / name / "metadata" for name in ("about", "callbacks", "data")] + [step / "metrics" / "metrics"]
    whole = [file for file in (*beside, tree / "_METADATA", tree / "manifest.ocdbt") if file.exists()]
    return {file: file.stat().st_size for file in whole} | {tree / of: size for of, size in needed_bytes(tree).items()}
