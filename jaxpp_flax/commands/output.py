"""The files that commands write: whether they can be written is known before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_output"]


def check_output(option: str, path: str | os.PathLike[str] | None) -> None:
    """Refuse a file that cannot be written; None, for an option that is not given, is right.

    Args:
      option: the option that names the file, for the message.

    Raises:
      ValueError: naming the option and the directory.

    Example:
      >>> check_output("--save", None)
      >>> check_output("--save", "/nodir/plan.json")
      Traceback (most recent call last):
      ValueError: --save /nodir/plan.json: there is no directory /nodir. Make it first.
    """
    if path is None:
        return
    file = Path(path)
    directory = file.parent
    if not directory.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {directory}. Make it first.")
    if file.is_dir():
        raise ValueError(f"{option} {path}: this is a directory. Give the name of a file in it.")
    if not os.access(file if file.exists() else directory, os.W_OK):
        raise ValueError(f"{option} {path}: you may not write there.")
