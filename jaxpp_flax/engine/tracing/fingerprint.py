"""Structural keys: two tasks with the same key compute the same function; names of variables do not matter.

So identical stages share one lowering. The key covers primitives, parameters (recursing into inner jaxprs), wiring
and types; it leaves out the names of calls, sources and debug information.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jaxpp_flax.engine.tracing.canonical_form import Operand, canonical_form, is_jaxpr, telling_params, type_facts
from jaxpp_flax.engine.tracing.ir import Constant, Equation, Graph, from_jaxpr
from jaxpp_flax.engine.tracing.static_arguments import types_within

__all__ = ["Fingerprinter"]


@dataclass(frozen=True, eq=False)
class _Same:
    """The identity of an unhashable value; the value is kept alive, so that no other value gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Fingerprinter:
    """Makes keys, and remembers those of graphs, inner jaxprs and parameters, which tasks share by identity."""

    def __init__(self) -> None:
        self._graphs = WeakKeyDictionary[Graph, int]()
        self._jaxprs: dict[int, tuple[Any, Hashable]] = {}
        self._operations: dict[tuple[Any, int, int], tuple[Equation, int]] = {}
        self._interned: dict[Hashable, int] = {}

    def graph(self, graph: Graph) -> int:
        key = self._graphs.get(graph)
        if key is None:
            form = canonical_form(graph)
            equations = [
                (self._operation(e), self._operands(operands), results) for e, operands, results in form.equations
            ]
            key = self._graphs[graph] = self._intern((form.inputs, self._operands(form.outputs), *equations))
        return key

    def _intern(self, key: Hashable) -> int:
        return self._interned.setdefault(key, len(self._interned))

    def _operation(self, equation: Equation) -> int:
        """Return the key of an equation without its operands."""
        identity = equation.primitive, id(equation.params), id(equation.context)
        known = self._operations.get(identity)
        if known is None:
            telling = tuple((name, self._value(value)) for name, value in telling_params(equation))
            key = self._intern((equation.primitive, telling, self._value(equation.context)))
            # The reference to the equation keeps both identities from being reused.
            known = self._operations[identity] = equation, key
        return known[1]

    def _operands(self, operands: tuple[Operand, ...]) -> Hashable:
        return tuple([self._constant(o.value, o.aval) if isinstance(o, Constant) else o for o in operands])

    def _constant(self, value: Any, aval: Any) -> Hashable:
        try:
            array = np.asarray(value)
        except TypeError:  # typed PRNG keys have no NumPy form
            return _Same(value)
        return ("constant", type_facts(aval), array.tobytes())

    def _value(self, value: Any) -> Hashable:
        if is_jaxpr(value):
            return self._jaxpr(value)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self._value, value))
        if isinstance(value, Mapping):
            items = sorted(value.items(), key=lambda kv: str(kv[0]))
            return ("dict", *((self._value(k), self._value(v)) for k, v in items))
        if isinstance(value, np.ndarray):
            return ("array", value.shape, str(value.dtype), value.tobytes())
        try:
            hash(value)
        except TypeError:
            return _Same(value)
        return (value, types_within(value))  # 1, 1.0 and True are equal, and so are 0.0 and -0.0

    def _jaxpr(self, jaxpr: Any) -> Hashable:
        if id(jaxpr) not in self._jaxprs:
            graph, captured = from_jaxpr(jaxpr)
            constants = tuple(self._constant(c, getattr(c, "aval", None)) for c in captured)
            # The reference to the jaxpr keeps its identity from being reused.
            self._jaxprs[id(jaxpr)] = (jaxpr, ("jaxpr", self.graph(graph), constants))
        return self._jaxprs[id(jaxpr)][1]
