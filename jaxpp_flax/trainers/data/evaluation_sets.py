"""The data of an evaluation: one set of batches, or several by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpp_flax.trainers.data.stream import check_batches

__all__ = ["evaluation_sets"]


def evaluation_sets(argument: str, data: Any) -> dict[str | None, Iterable[Any]]:
    """Return the sets of batches by name; the name of a single one is None. `argument` is for errors.

    Raises:
      TypeError: for one batch, an array, or what cannot be iterated.
      ValueError: for a mapping without a set, or a name that is no text, is empty or has a slash.

    Example:
      >>> evaluation_sets("data", [1, 2])
      {None: [1, 2]}
      >>> evaluation_sets("data", {"books": [1], "code": [2]})
      {'books': [1], 'code': [2]}
    """
    if not isinstance(data, Mapping) or any(_is_leaf(value) for value in data.values()):
        check_batches(argument, data)
        return {None: data}
    if not data:
        raise ValueError(f"{argument} is an empty mapping: it names no set of batches.")
    for name, batches in data.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"{argument} has a set of the name {name!r}. Name each set by a text without a slash: metrics are "
                "named `<set>/<metric>`."
            )
        check_batches(f"{argument}[{name!r}]", batches)
    return dict(data)


def _is_leaf(value: Any) -> bool:
    """Return whether a value is a leaf of a batch, and no set of batches."""
    return hasattr(value, "shape") or isinstance(value, complex | float | int | str | bytes)
