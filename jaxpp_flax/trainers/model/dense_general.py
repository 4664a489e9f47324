"""A Linen `DenseGeneral` with annotated parameters, traced under a mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flax import core
from flax import linen as nn

__all__ = ["checked_without_annotations"]

_INITIALIZERS = ("kernel_init", "bias_init")


def checked_without_annotations() -> AbstractContextManager[Any]:
    """Return a context in which a `DenseGeneral` compares the shapes of its parameters without their annotations.

    For each parameter that exists, Linen traces the initializer to compare the shapes. `DenseGeneral` calls the user's
    initializer for a flat kernel of two dimensions, and opens its annotation, which has a name for each dimension of
    the final kernel. Under a mesh this constrains the flat kernel by too many names, and fails. The annotations of the
    parameters themselves are read when the trainer is made: nothing is lost here.
    """
    return nn.intercept_methods(_intercept)


def _intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    module = context.module
    if not isinstance(module, nn.DenseGeneral) or module.is_initializing():
        return call(*args, **kwargs)
    given = {name: getattr(module, name) for name in _INITIALIZERS}
    try:
        for name, initializer in given.items():
            object.__setattr__(module, name, _Plain(initializer))  # modules are frozen
        return call(*args, **kwargs)
    finally:
        for name, initializer in given.items():
            object.__setattr__(module, name, initializer)


class _Plain:
    """An initializer whose values have no annotation."""

    def __init__(self, initializer: Callable[..., Any]) -> None:
        self._initializer = initializer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._initializer(*args, **kwargs)
        while isinstance(value, core.meta.Partitioned):
            value = value.value
        return value
