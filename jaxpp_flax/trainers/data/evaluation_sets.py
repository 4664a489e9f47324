"""The data of an evaluation: one set of batches, or several by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxpp_flax.trainers.data.stream import check_batches

__all__ = ["evaluation_sets"]


def evaluation_sets(argument: str, data: Any, *, every: str | None = None) -> dict[str | None, Iterable[Any]]:
    """Return the sets of batches by name; the name of a single one is None.

    Args:
      argument: the name of the argument, for errors.
      every: the argument, with its value, that has the sets evaluated several times; None: they are evaluated once.

    Raises:
      TypeError: for one batch, an array, or what cannot be iterated.
      ValueError: for a mapping without a set, a name that is no text, is empty or has a slash, or an iterator with
        `every`.

    Example:
      >>> evaluation_sets("data", [1, 2])
      {None: [1, 2]}
      >>> evaluation_sets("data", {"books": [1], "code": [2]})
      {'books': [1], 'code': [2]}
    """
    if not isinstance(data, Mapping) or any(_is_leaf(value) for value in data.values()):
        _check_set(argument, data, argument, every)
        return {None: data}
    if not data:
        raise ValueError(f"{argument} is an empty mapping: it names no set of batches.")
    for name, batches in data.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"{argument} has a set of the name {name!r}. Name each set by a text without a slash: metrics are "
                "named `<set>/<metric>`."
            )
        _check_set(f"{argument}[{name!r}]", batches, argument, every)
    return dict(data)


def _check_set(name: str, batches: Any, argument: str, every: str | None) -> None:
    check_batches(name, batches)
    if every is not None and isinstance(batches, Iterator):
        raise ValueError(
            f"{every} needs {argument} that can be iterated again, but a {type(batches).__name__} can be iterated only "
            "once. Pass a list."
        )


def _is_leaf(value: Any) -> bool:
    """Return whether a value is a leaf of a batch, and no set of batches: a `datasets.Dataset` has a shape too."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array or isinstance(value, complex | float | int | str | bytes)
