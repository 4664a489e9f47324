"""Static arguments as parts of a key: equal values of different types (2 and 2.0) trace different programs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["StaticArgument", "types_within", "unhashable", "unwrapping"]


@dataclasses.dataclass(frozen=True)
class StaticArgument:
    """A static argument that equals others of the same value and the same types, at any depth of containers.

    `jax.jit` compares only the type of the argument itself: for `jax.jit`, `(2,)` and `(2.0,)` are equal, and so are
    0.0 and -0.0.

    Example:
      >>> StaticArgument.of((2,)) == StaticArgument.of((2.0,)), StaticArgument.of((2,)) == StaticArgument.of((2,))
      (False, True)
    """

    value: Any
    types: Hashable

    @classmethod
    def of(cls, value: Any) -> StaticArgument:
        """Make the argument, with the types of all values in it."""
        return cls(value, types_within(value))


def types_within(value: Any) -> Hashable:
    """Return the types of a hashable value and of all values in it, and the signs of floats; `==` ignores these.

    Example:
      >>> types_within((1, -0.0)) == types_within((1, 0.0)), types_within((1, 2.0)) == types_within((3, 4.0))
      (False, True)
    """
    if isinstance(value, tuple):
        return (type(value), *map(types_within, value))
    if isinstance(value, frozenset):
        return (type(value), frozenset((element, types_within(element)) for element in value))
    if isinstance(value, Mapping):
        return (type(value), frozenset((key, types_within(key), types_within(of)) for key, of in value.items()))
    if isinstance(value, functools.partial):
        return (type(value), *map(types_within, (value.func, value.args, tuple(value.keywords.items()))))
    if not isinstance(value, type) and getattr(getattr(value, "__dataclass_params__", None), "eq", False):
        compared = (field.name for field in dataclasses.fields(value) if field.compare)
        return (type(value), *(types_within(getattr(value, name, None)) for name in compared))
    if isinstance(value, (float, np.floating)):
        return (type(value), math.copysign(1.0, value))
    if isinstance(value, complex):
        return (type(value), math.copysign(1.0, value.real), math.copysign(1.0, value.imag))
    return type(value)


def unhashable(fun: Callable[..., Any], statics: Sequence[tuple[int | str, StaticArgument]]) -> TypeError:
    """Return the error for a static argument, by position or name, that cannot be hashed."""
    names = list(inspect.signature(fun).parameters)
    for where, static in statics:
        try:
            hash(static)
        except TypeError:
            name = where if isinstance(where, str) else names[where] if where < len(names) else f"number {where}"
            return TypeError(
                f"the static argument {name!r} is a {type(static.value).__name__}, which cannot be hashed, so the step "
                "compiled for it could not be found again. Pass a hashable value (a tuple, a frozen dataclass), or "
                "an array that is not static."
            )
    return TypeError("a static argument cannot be hashed.")


def unwrapping(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let `fun` take `StaticArgument`s as arguments, so that JAX also distinguishes its traces by their types."""

    @functools.wraps(fun)
    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        return fun(*map(_value, args), **{name: _value(argument) for name, argument in kwargs.items()})

    return unwrapped


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, StaticArgument) else argument
