"""What trackers need of one another: values in a form that they can write, and the packages that they ask for."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["need_package", "plain_value", "scalar_or_text"]


def need_package(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"this tracker needs the package {module!r}, which is not installed: `pip install 'jaxpp-flax[{extra}]'`."
        )


def scalar_or_text(value: Any) -> float | str:
    """Return a number as a float, a text as it is, and anything else as a text: a tracker leaves no value out.

    >>> scalar_or_text(np.float32(0.5)), scalar_or_text(np.ones((2, 1)))
    (0.5, 'float64[2,1]\\n[[1.]\\n [1.]]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if not hasattr(value, "dtype"):
        return repr(value)
    array = np.asarray(value)
    if array.ndim == 0 and np.can_cast(array.dtype, np.float64, "same_kind"):
        return float(array)
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype}[{shape}]\n{np.array2string(array, threshold=1000)}"


def plain_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "tolist"):
        return plain_value(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    return repr(value)
