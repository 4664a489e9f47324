"""Attributes of a module that a call changes in place: lists, dictionaries, sets and plain objects.

A bound module shares these with the user's module. So each trace would begin where the last one ended, and no
comparison of the attributes before and after a call would see it: both are the same object.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

__all__ = ["Contents", "is_state", "same"]

_MOST = 10_000  # of more containers, those that come last are not looked into
# Objects of libraries are not looked into: they may have locks, threads, and devices.
_LIBRARIES = {*sys.stdlib_module_names, "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "optax"} - {
    "types", "argparse", "__main__",
}  # fmt: skip
_ATOMS = (str, bytes, int, float, complex, type(None), type)


class Contents:
    """What the attributes of a module held before a call, without arrays, variables and other modules.

    Example:
      >>> class Model(nnx.Module):
      ...     def __init__(self):
      ...         self.sizes = nnx.static([1])
      >>> model = Model()
      >>> contents = Contents(model)
      >>> model.sizes.append(2)
      >>> contents.change()
      ('sizes', [1], [1, 2])
      >>> contents.restore()
      >>> model.sizes
      [1]
    """

    def __init__(self, module: Any) -> None:
        self._parts: dict[int, tuple[str, Any, Any]] = {}  # the path of each container, the container, what it held
        for path, part in nnx.iter_modules(module) if isinstance(module, nnx.Module) else ():
            is_data = vars(part).get("_pytree__nodes", {})  # such containers are made anew for each bound module
            for name, value in vars(part).items():
                if not name.startswith("_pytree__") and not is_data.get(name, False):
                    self._add("/".join(map(str, (*path, name))), value)

    def change(self) -> tuple[str, Any, Any] | None:
        """Return the path of the first value that the call has changed, with the value before and after."""
        for path, value, held in self._parts.values():
            if isinstance(held, dict):
                now = _held(value)
                for key in (*held, *(key for key in now if key not in held)):
                    if not same(held.get(key), now.get(key)) or (key in held) != (key in now):
                        return f"{path}/{key}", held.get(key), now.get(key)
            elif not _same_items(held, value, same):
                return path, held, _held(value)
        return None

    def restore(self) -> None:
        """Put back what the call has changed."""
        for _, value, held in self._parts.values():
            if isinstance(value, dict):
                if not _same_items([*held, *held.values()], [*value, *value.values()], operator.is_):
                    dict.clear(value)
                    dict.update(value, held)
            elif isinstance(held, dict):
                _restore_object(value, held)
            elif not _same_items(held, value, operator.is_):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(held)

    def _add(self, path: str, value: Any) -> None:
        """Note a container, and those in it; a list of work, as objects may refer to one another without end."""
        pending, tuples = deque([(path, value)]), set[int]()
        while pending and len(self._parts) < _MOST:
            path, value = pending.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._parts or id(value) in tuples or is_state(value):
                continue
            if isinstance(value, tuple):
                tuples.add(id(value))
                held = value
            elif (held := _held(value)) is not None:
                self._parts[id(value)] = path, value, held
            pending.extend((f"{path}/{key}", inner) for key, inner in _items(held) if not isinstance(inner, _ATOMS))


def is_state(value: Any) -> bool:
    """Return True for arrays, variables and modules: what NNX keeps as state."""
    return isinstance(value, (nnx.Variable, nnx.Module, nnx.Pytree, jax.Array, np.ndarray))


def same(one: Any, other: Any) -> bool:
    """Return True for equal values, and for an array that stands in place of one that an earlier trace has left."""
    try:
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return np.array_equal(one, other)
        return one is other or (isinstance(one, Tracer) and is_state(other)) or bool(one == other)
    except Exception:
        return False


def _same_items(held: Any, value: Any, alike: Callable[[Any, Any], bool]) -> bool:
    if isinstance(held, set):
        return held == value
    return len(held) == len(value) and all(alike(a, b) for a, b in zip(held, value, strict=True))


def _held(value: Any) -> Any:
    """Return a copy of what a container holds; None for what is not looked into."""
    for kind in (dict, list, deque, set):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__.split(".")[0] in _LIBRARIES:
        return None
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})} or None


def _items(held: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(held, dict):
        yield from held.items()
    elif held is not None and not isinstance(held, set):
        yield from enumerate(held)


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def _restore_object(value: Any, held: dict[str, Any]) -> None:
    slots, now = {*_slots(value)}, _held(value) or {}
    for name in now.keys() - held.keys():
        object.__delattr__(value, name) if name in slots else vars(value).pop(name)
    for name, before in held.items():
        if now.get(name) is not before:
            object.__setattr__(value, name, before) if name in slots else vars(value).update({name: before})
