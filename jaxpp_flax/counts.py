"""Counts: the one check of every argument that is a whole number of at least 1."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["check_count", "is_whole"]


def is_whole(value: Any) -> bool:
    """Return True for whole numbers, of Python, NumPy or JAX; False for booleans too.

    Example:
      >>> import numpy as np
      >>> is_whole(np.int64(2)), is_whole(2.0), is_whole(True)
      (True, False, False)
    """
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_count(name: str, value: Any, otherwise: str = "") -> int:
    """Return `value` as an int; refuse all but whole numbers of at least 1.

    Args:
      otherwise: what else the argument may be, for the message.

    Raises:
      ValueError: naming the argument.

    Example:
      >>> import numpy as np
      >>> check_count("steps", np.int64(100))
      100
    """
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1{otherwise}.")
    return operator.index(value)
