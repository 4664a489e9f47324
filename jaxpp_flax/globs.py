"""Globs on names: the one rule for `frozen=`, `only=` of a restore, an assignment by name, and maps of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

__all__ = ["NameFilter", "captures", "matches", "matches_any"]

NameFilter: TypeAlias = str | Sequence[str] | Callable[[str], bool]
"""A glob, several of them, or a function of the name."""


def matches(name: str, glob: str) -> bool:
    """Whether `glob` is the name, matches it, or matches its beginning up to a slash; `*` matches slashes too.

    Example:
      >>> [matches("blocks/0/kernel", glob) for glob in ("blocks", "blocks/[01]/*", "*/kernel", "block")]
      [True, True, True, False]
      >>> matches("layer[0]", "layer[0]")  # brackets are a part of this name
      True
    """
    return name == glob or fnmatchcase(name, glob) or fnmatchcase(name, f"{glob.rstrip('/')}/*")


def matches_any(chosen: NameFilter) -> Callable[[str], bool]:
    """Whether a name is chosen: by a glob, by any of several globs, or by a function.

    Example:
      >>> is_chosen = matches_any(["params/*", "step"])
      >>> is_chosen("params/head/kernel"), is_chosen("step"), is_chosen("opt_state/0/mu")
      (True, True, False)
    """
    if callable(chosen):
        return lambda name: bool(chosen(name))
    globs = [chosen] if isinstance(chosen, str) else list(chosen)
    return lambda name: any(matches(name, glob) for glob in globs)


def captures(name: str, glob: str) -> tuple[str, ...] | None:
    """Return the text that each `*` of `glob` stands for in the whole name, as short as possible; None if none fits.

    Example:
      >>> captures("layers/3/query/kernel", "layers/*/query/kernel"), captures("head/kernel", "head/kernel")
      (('3',), ())
      >>> captures("head/bias", "head/kernel") is None
      True
    """
    found = re.fullmatch("(.+?)".join(map(re.escape, glob.split("*"))), name)
    return None if found is None else found.groups()
