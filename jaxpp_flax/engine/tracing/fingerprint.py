"""Structural keys: two tasks with the same key compute the same function, so identical stages share one lowering."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from jaxpp_flax.engine.tracing.graph_text import GraphText
from jaxpp_flax.engine.tracing.ir import Equation, Graph

__all__ = ["Fingerprinter"]


@dataclass(frozen=True, eq=False)
class _Same:
    """The identity of a value that cannot be compared; it is kept alive, so that no other value gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Fingerprinter(GraphText):
    """Makes keys, and remembers those of graphs, inner jaxprs and parameters, which tasks share by identity.

    Every type and every parameter is written as the number of all that are equal to it.
    """

    def __init__(self) -> None:
        self._graphs = WeakKeyDictionary[Graph, int]()
        self._bodies: dict[int, tuple[Any, str]] = {}
        self._operations: dict[tuple[Any, int, int], tuple[Equation, str]] = {}
        self._numbers: dict[Hashable, int] = {}

    def graph(self, graph: Graph) -> int:
        key = self._graphs.get(graph)
        if key is None:
            key = self._graphs[graph] = self._number("\n".join(self.lines(graph)))
        return key

    def type(self, aval: Any) -> str:
        return f"#{self._number(aval)}"

    def leaf(self, value: Any) -> str:
        return f"#{self._number(_comparable(value))}"

    def operation(self, equation: Equation) -> str:
        identity = equation.primitive, id(equation.params), id(equation.context)
        known = self._operations.get(identity)
        if known is None:
            # Two primitives can share a name.
            text = f"{self.leaf(equation.primitive)}{self.leaf(equation.context)}[{self.parameters(equation)}]"
            # The reference to the equation keeps both identities from being reused.
            known = self._operations[identity] = equation, f"#{self._number(text)}"
        return known[1]

    def body(self, jaxpr: Any) -> str:
        if id(jaxpr) not in self._bodies:
            # The reference to the jaxpr keeps its identity from being reused.
            self._bodies[id(jaxpr)] = jaxpr, f"#{self._number(super().body(jaxpr))}"
        return self._bodies[id(jaxpr)][1]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _comparable(value: Any) -> Hashable:
    """Return what is equal for equal values alone: 1, 1.0 and True are equal for Python, and so are 0.0 and -0.0."""
    if isinstance(value, (np.ndarray, jax.Array, np.generic, float, complex)):
        try:
            array = np.asarray(value)
        except (TypeError, RuntimeError):  # typed PRNG keys have no NumPy form, and this process may hold a part alone
            return _Same(value)
        kind = type(value) if isinstance(value, (np.generic, float, complex)) else np.ndarray
        return kind, str(array.dtype), array.shape, array.tobytes()
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value
