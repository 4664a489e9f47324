"""Structural keys: two tasks with the same key compute the same function, so identical stages share one lowering."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.tracing.graph_text import GraphText
from jaxpp_flax.engine.tracing.ir import Equation, Graph

__all__ = ["Fingerprinter"]


class Fingerprinter(GraphText):
    """Makes keys, and remembers those of inner jaxprs and parameters, which tasks share by identity.

    Every type and every parameter is written as the number of all that are equal to it.
    """

    def __init__(self) -> None:
        self._bodies: dict[int, str] = {}
        self._operations: dict[tuple[Any, int, int], str] = {}
        self._numbers: dict[Hashable, int] = {}
        self._kept: list[Any] = []  # what is known by its identity: no other value may get its address

    def graph(self, graph: Graph) -> int:
        """Return the number of a graph and of all that compute the same."""
        return self._number("\n".join(self.lines(graph)))

    def type(self, aval: Any) -> str:
        return f"#{self._number(aval)}"

    def leaf(self, value: Any) -> str:
        key = _comparable(value)
        if key is None:
            self._kept.append(value)
            key = "object", id(value)
        return f"#{self._number(key)}"

    def operation(self, equation: Equation) -> str:
        identity = equation.primitive, id(equation.params), id(equation.context)
        if identity not in self._operations:
            # Two primitives can share a name.
            text = f"{self.leaf(equation.primitive)}{self.leaf(equation.context)}[{self.parameters(equation)}]"
            self._operations[identity] = f"#{self._number(text)}"
            self._kept.append(equation)
        return self._operations[identity]

    def body(self, jaxpr: Any) -> str:
        if id(jaxpr) not in self._bodies:
            self._bodies[id(jaxpr)] = f"#{self._number(super().body(jaxpr))}"
            self._kept.append(jaxpr)
        return self._bodies[id(jaxpr)]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _comparable(value: Any) -> Hashable | None:
    """Return a key that is equal for equal values alone, not for 1 and True, 0.0 and -0.0; None if there is none."""
    if isinstance(value, (np.ndarray, jax.Array, np.generic, float, complex)):
        try:
            array = np.asarray(value)
        except (TypeError, RuntimeError):  # typed PRNG keys have no NumPy form, and this process may hold a part alone
            return None
        kind = type(value) if isinstance(value, (np.generic, float, complex)) else np.ndarray
        return kind, str(array.dtype), array.shape, array.tobytes()
    try:
        hash(value)
    except TypeError:
        return None
    return type(value), value
