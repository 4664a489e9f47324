"""Frozen parameters: `frozen=` names them by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpp_flax.globs import NameFilter, matches, matches_any
from jaxpp_flax.trainers.errors import ModelError


def path_text(path: Iterable[Any]) -> str:
    """Convert a path of JAX or NNX to text: `blocks/0/widen/kernel`."""
    parts: list[str] = []
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value":
            continue  # the array in a Variable
        parts.append(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))))
    return "/".join(parts)


def check_frozen(frozen: object) -> None:
    """Raise a `TypeError` if `frozen` is not a glob, a sequence of globs or a function."""
    if callable(frozen) or isinstance(frozen, str):
        return
    if not isinstance(frozen, Sequence) or not all(isinstance(pattern, str) for pattern in frozen):
        raise TypeError(f"frozen={frozen!r}: use paths such as 'embed/*', a list of them, or a function of the path.")


def frozen_filter(frozen: NameFilter, paths: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that is True for the path of a frozen parameter.

    Args:
      frozen: one glob or several (see `jaxpp_flax.globs`), or a function of the path.
      paths: the paths of all parameters.

    Example:
      >>> is_frozen = frozen_filter("blocks/[01]", ["blocks/0/kernel", "blocks/1/kernel", "head/kernel"])
      >>> is_frozen("blocks/0/kernel"), is_frozen("head/kernel")
      (True, False)
    """
    check_frozen(frozen)
    if callable(frozen):
        return matches_any(frozen)
    for pattern in [frozen] if isinstance(frozen, str) else frozen:
        if not any(matches(path, pattern) for path in paths):
            known = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise ModelError(f"frozen: no parameter matches {pattern!r}. The parameters are {known}.")
    return matches_any(frozen)


def split_frozen(params: Any, is_frozen: Callable[[str], bool]) -> tuple[Any, Any]:
    """Split a nested dict of parameters in two: the trained ones and the frozen ones."""

    def walk(tree: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
        trained: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for key, node in tree.items():
            if isinstance(node, Mapping):
                both = walk(node, (*path, key))
                trained.update({key: both[0]} if both[0] else {})
                kept.update({key: both[1]} if both[1] else {})
            else:
                (kept if is_frozen("/".join((*path, key))) else trained)[key] = node
        return trained, kept

    return walk(params, ())


def merge_frozen(trained: Any, frozen: Any) -> Any:
    """Merge the two parts from `split_frozen` to one nested dict."""
    merged = dict(trained)
    for key, node in frozen.items():
        merged[key] = merge_frozen(merged.get(key, {}), node) if isinstance(node, Mapping) else node
    return merged
