"""Rewrite equations of ours and of JAX alike, at any depth; what does not change stays the same object."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpp_flax.engine.tracing.ir import Equation, opened

__all__ = ["NestedRewriter", "changed", "is_same", "part_of"]

# JAX's names of the attributes of an equation.
_NAMES_IN_JAX = {"context": "ctx", "inputs": "invars", "outputs": "outvars", "source": "source_info"}


def part_of(equation: Any, name: str) -> Any:
    """Return an attribute of an equation, which JAX may call otherwise."""
    return getattr(equation, name if isinstance(equation, Equation) else _NAMES_IN_JAX.get(name, name))


def changed(equation: Any, **parts: Any) -> Any:
    """Return an equation with some attributes changed."""
    parts = {name: new for name, new in parts.items() if new is not part_of(equation, name)}
    if not parts:
        return equation
    if isinstance(equation, Equation):
        return replace(equation, **parts)
    return equation.replace(**{_NAMES_IN_JAX.get(name, name): new for name, new in parts.items()})


def is_same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(new) == len(old) and all(map(operator.is_, new, old))


class NestedRewriter:
    """Rewrites parameters: jaxprs by `jaxpr`, which takes one without captured arrays, and other values by `leaf`."""

    def __init__(self, jaxpr: Callable[[Any], Any], leaf: Callable[[Any], Any] = lambda value: value) -> None:
        self._rewrite, self._leaf = jaxpr, leaf
        self._memo: dict[int, tuple[Any, Any]] = {}  # keeps the old object alive, so that no other one gets its id

    def params(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        new = [self.value(value) for value in params.values()]
        return params if is_same(new, [*params.values()]) else dict(zip(params, new, strict=True))

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):  # most parameters
            return value
        if hasattr(opened(value), "eqns"):
            return self.once(value, self._jaxpr)
        if isinstance(value, (tuple, list)):
            parts = [self.value(part) for part in value]
            # A named tuple is made by its own function.
            return value if is_same(parts, value) else getattr(value, "_make", type(value))(parts)
        return self._leaf(value)

    def once(self, value: Any, rewrite: Callable[[Any], Any]) -> Any:
        """Rewrite an object that several equations share."""
        if id(value) not in self._memo:
            self._memo[id(value)] = (value, rewrite(value))
        return self._memo[id(value)][1]

    def _jaxpr(self, jaxpr: Any) -> Any:
        inner = opened(jaxpr)
        new = self._rewrite(inner)
        if new is inner:
            return jaxpr
        return new if inner is jaxpr else jaxpr.replace(jaxpr=new)
