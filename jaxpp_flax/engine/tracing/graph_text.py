"""Graphs as text that is equal for functions that compute the same.

Values are numbered in the order of their definition. Only what changes results is written: no names of calls, no
sources, no debug information. One walk serves two readers, who write types and single parameters in their own way: the
keys by which equal tasks are compiled once (`Fingerprinter`), and the lines that processes compare (`describe_graph`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import DebugInfo

from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, from_jaxpr, opened
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["Fingerprinter", "GraphText"]


class GraphText(ABC):
    """Writes graphs. A subclass says how a type is written, and how a parameter that holds no others."""

    @abstractmethod
    def type(self, aval: Any) -> str:
        """Return the type of a value as text."""

    @abstractmethod
    def leaf(self, value: Any) -> str:
        """Return a parameter without others in it as text."""

    def operation(self, equation: Equation) -> str:
        """Return an equation without its operands and results as text."""
        return f"{equation.name}[{self.parameters(equation)}]"

    def parameters(self, equation: Equation) -> str:
        """Return the parameters that change an equation's results as text."""
        unread = facts_of(equation.primitive).unread
        telling = [item for item in sorted(equation.params.items()) if item[0] not in unread]
        return ", ".join([f"{name}={self.value(value)}" for name, value in telling if not isinstance(value, DebugInfo)])

    def lines(self, graph: Graph) -> Iterator[str]:
        """Yield the inputs, each equation, and the outputs as one line each."""
        numbers: dict[Value, int] = {}

        def read(atoms: Sequence[Atom]) -> str:
            return ", ".join([self._constant(a) if isinstance(a, Constant) else f"%{numbers[a]}" for a in atoms])

        def defined(values: Sequence[Value]) -> str:
            return ", ".join([f"%{numbers.setdefault(v, len(numbers))}:{self.type(v.aval)}" for v in values])

        yield f"inputs {defined(graph.inputs)}"
        for equation in graph.equations:
            operands = read(equation.inputs)
            yield f"{defined(equation.outputs)} = {self.operation(equation)}({operands})"
        yield f"outputs {read(graph.outputs)}"

    def _constant(self, constant: Constant) -> str:
        return f"{self.leaf(constant.value)}:{self.type(constant.aval)}"

    def value(self, value: Any) -> str:
        """Return a parameter as text, with all values in it."""
        if hasattr(opened(value), "eqns"):
            return self.body(value)
        if isinstance(value, (tuple, list)):
            return f"{self._kind(value)}({', '.join(map(self.value, value))})"
        if isinstance(value, Mapping):
            items = sorted(value.items(), key=lambda item: str(item[0]))
            return f"{self._kind(value)}{{{', '.join(f'{self.value(k)}: {self.value(entry)}' for k, entry in items)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{self._kind(value)}{{{', '.join(sorted(map(self.value, value)))}}}"
        return self.leaf(value)

    def body(self, jaxpr: Any) -> str:
        """Return an inner jaxpr, with the arrays that it holds, as text."""
        graph, captured = from_jaxpr(jaxpr)
        return "{" + "; ".join([*map(self.leaf, captured), *self.lines(graph)]) + "}"

    def _kind(self, container: Any) -> str:
        return "" if type(container) is tuple else self.leaf(type(container))


class Fingerprinter(GraphText):
    """Makes keys, and remembers those of inner jaxprs and parameters, which tasks share by identity.

    Every type and every parameter is written as the number of all that are equal to it.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, int] = {}
        self._bodies: dict[int, str] = {}
        self._operations: dict[tuple[Any, int, int], str] = {}
        self._numbers: dict[Hashable, int] = {}
        self._kept: list[Any] = []  # what is known by its identity: no other value may get its address

    def graph(self, graph: Graph) -> int:
        """Return the number of a graph and of all that compute the same."""
        # Programs for other patterns of shapes have graphs of the same equations.
        identity = graph.inputs, graph.outputs, graph.equations
        if identity not in self._graphs:
            self._graphs[identity] = self._number("\n".join(self.lines(graph)))
        return self._graphs[identity]

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
