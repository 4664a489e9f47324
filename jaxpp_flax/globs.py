"""Globs on names: the one rule for `frozen=`, `only=` of a restore, an assignment by name, and maps of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

__all__ = ["NameFilter", "captures", "covering_globs", "matches", "matches_any"]

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


def covering_globs(wanted: Sequence[str], others: Collection[str], most: int | None = None) -> list[str]:
    """Return few globs that match every wanted path and none of the others; nothing if these are more than `most`.

    Example:
      >>> covering_globs(["predictor/bias", "predictor/mlp/kernel", "token"], ["encoder/kernel"])
      ['predictor/*', 'token']
      >>> covering_globs(["layers/0/key/bias", "layers/1/key/bias"], ["layers/0/key/kernel", "layers/1/key/kernel"])
      ['layers/*/key/bias']
    """
    found: list[str] = []
    for path in wanted:
        if any(matches(path, glob) for glob in found):
            continue
        if len(found) == most:
            return []
        parts = path.split("/")
        subtrees = ["/".join(parts[:length]) + "/*" for length in range(1, len(parts))]
        in_all_layers = [re.sub(r"(^|/)\d+(?=/|$)", r"\1*", glob) for glob in (*subtrees, path)]
        allowed = [glob for glob in (*subtrees, *in_all_layers) if not any(matches(other, glob) for other in others)]
        found.append(max((path, *allowed), key=lambda glob: sum(matches(other, glob) for other in wanted)))
    return found
