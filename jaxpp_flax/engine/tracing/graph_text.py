"""Graphs as text that is equal for functions that compute the same.

Values are numbered in the order of their definition. Only what changes results is written: no names of calls, no
sources, no debug information. One walk serves two readers, who write types and single parameters in their own way: the
keys by which equal tasks are compiled once (`Fingerprinter`), and the lines that processes compare (`describe_graph`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import DebugInfo

from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, from_jaxpr, opened
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["GraphText"]


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
        return ", ".join([f"{name}={self.value(of)}" for name, of in telling if not isinstance(of, DebugInfo)])

    def lines(self, graph: Graph) -> Iterator[str]:
        """Yield the inputs, each equation, and the outputs as one line each."""
        numbers: dict[Value, int] = {}

        def read(atoms: Sequence[Atom]) -> str:
            return ", ".join([self._constant(a) if isinstance(a, Constant) else f"%{numbers[a]}" for a in atoms])

        def made(values: Sequence[Value]) -> str:
            return ", ".join([f"%{numbers.setdefault(v, len(numbers))}:{self.type(v.aval)}" for v in values])

        yield f"inputs {made(graph.inputs)}"
        for equation in graph.equations:
            operands = read(equation.inputs)
            yield f"{made(equation.outputs)} = {self.operation(equation)}({operands})"
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
            return f"{self._kind(value)}{{{', '.join(f'{self.value(k)}: {self.value(of)}' for k, of in items)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{self._kind(value)}{{{', '.join(sorted(map(self.value, value)))}}}"
        return self.leaf(value)

    def body(self, jaxpr: Any) -> str:
        """Return an inner jaxpr, with the arrays that it holds, as text."""
        graph, captured = from_jaxpr(jaxpr)
        return "{" + "; ".join([*map(self.leaf, captured), *self.lines(graph)]) + "}"

    def _kind(self, container: Any) -> str:
        return "" if type(container) is tuple else self.leaf(type(container))
