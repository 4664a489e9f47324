"""The metadata of NNX variables that name a mesh axis for each dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["axis_names_key"]

# In newer and older versions of Flax.
_KEYS = ("out_sharding", "sharding_names", "sharding")


def axis_names_key(metadata: Mapping[str, Any]) -> str | None:
    """Return the key of the axes' names in a variable's metadata; None if the variable has none.

    Example:
      >>> axis_names_key({"out_sharding": None, "sharding": ("embed", None)}), axis_names_key({"out_sharding": ()})
      ('sharding', None)
    """
    return next((key for key in _KEYS if metadata.get(key)), None)
