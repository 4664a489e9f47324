"""Refuse specs that cannot cut an argument or a result into equal parts; the error names the value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

__all__ = ["check_divides"]


def check_divides(
    names: Sequence[str], values: Sequence[Any], specs: Sequence[PartitionSpec | None], sizes: Mapping[str, int]
) -> None:
    """Refuse specs that do not fit the shapes of their values.

    Args:
      names: the names of the arguments or results, for messages.
      values: arrays or shapes.
      specs: the axes that cut each dimension; None for a value without a requested spec.
      sizes: the sizes of the axes of a rank's submesh.

    Raises:
      ValueError: naming the value, the dimension and the axes.

    Example:
      >>> import jax
      >>> check_divides(["argument[0]"], [jax.ShapeDtypeStruct((3, 4), "int8")], [PartitionSpec("data")], {"data": 2})
      Traceback (most recent call last):
        ...
      ValueError: argument[0] has shape (3, 4), and ... cuts its dimension 0 into 2 equal parts (data: 2); 3 is no...
    """
    for name, value, spec in zip(names, values, specs, strict=True):
        if spec is not None:
            _check_one(name, value.shape, spec, sizes)


def _check_one(name: str, shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> None:
    if len(spec) > len(shape):
        raise ValueError(
            f"{name} has shape {tuple(shape)}, but {spec} says how {len(spec)} dimensions are cut. Give an entry for "
            "each dimension at most."
        )
    for dimension, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        axes = entry if isinstance(entry, tuple) else (entry,)
        parts = math.prod(sizes[axis] for axis in axes if axis in sizes)
        if size % parts:
            lower = size - size % parts
            fits = " or ".join(str(n) for n in (lower, lower + parts) if n)
            raise ValueError(
                f"{name} has shape {tuple(shape)}, and {spec} cuts its dimension {dimension} into {parts} equal parts "
                f"({', '.join(f'{axis}: {sizes[axis]}' for axis in axes if axis in sizes)}); {size} is no multiple of "
                f"{parts}. Make the dimension {fits}, or leave it whole: None in its place."
            )
