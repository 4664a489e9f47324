"""Frozen parameters: `frozen=` names them by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxpp_flax.globs import NameFilter, matches, matches_any
from jaxpp_flax.trainers.errors import ModelError


def path_text(path: Iterable[Any]) -> str:
    """Convert a path of JAX or NNX to text: `blocks/0/widen/kernel`. The array in a Variable adds nothing."""
    steps = tuple(key for key in path if key != jax.tree_util.GetAttrKey("value"))
    return jax.tree_util.keystr(steps, simple=True, separator="/")


def check_frozen(frozen: object) -> None:
    """Raise a `TypeError` if `frozen` is not a glob, a sequence of globs or a function."""
    if callable(frozen) or isinstance(frozen, str):
        return
    if not isinstance(frozen, Sequence) or not all(isinstance(pattern, str) for pattern in frozen):
        raise TypeError(f"frozen={frozen!r}: use paths such as 'embed/*', a list of them, or a function of the path.")


def frozen_filter(frozen: NameFilter, paths: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that is True for the path of a frozen parameter; `paths` has the paths of all parameters.

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
    trained: dict[Any, Any] = {}
    frozen: dict[Any, Any] = {}
    for path, leaf in flatten_dict(params).items():
        (frozen if is_frozen("/".join(path)) else trained)[path] = leaf
    return unflatten_dict(trained), unflatten_dict(frozen)


def merge_frozen(trained: Any, frozen: Any) -> Any:
    """Merge the two parts from `split_frozen` to one nested dict."""
    return unflatten_dict({**flatten_dict(trained), **flatten_dict(frozen)})
