"""Structural keys: two tasks with the same key compute the same function; names of variables do not matter.

So identical stages share one lowering. The key covers primitives, parameters (recursing into inner jaxprs), wiring
and types; it leaves out the names of calls, sources and debug information.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from jaxpp_flax.engine.tracing.equation_parameters import telling
from jaxpp_flax.engine.tracing.ir import Constant, Graph, Value, memory_kind_of, opened
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
    """Makes keys, and remembers the keys of inner jaxprs, which stages share by identity."""

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Any, int]] = {}
        self._interned: dict[Hashable, int] = {}

    def graph(self, graph: Graph) -> Hashable:
        """Return the key of a graph."""
        numbers: dict[Value, int] = {}
        parts: list[Hashable] = []

        def number(value: Value) -> int:
            return numbers.setdefault(value, len(numbers))

        def atom(a: Value | Constant) -> Hashable:
            return self._constant(a.value, a.aval) if isinstance(a, Constant) else number(a)

        parts.append(tuple((number(v), self._aval(v.aval)) for v in graph.inputs))
        for e in graph.equations:
            parts.append(
                (
                    e.primitive,
                    self._params(e.primitive, e.params),
                    tuple(map(atom, e.inputs)),
                    tuple((number(v), self._aval(v.aval)) for v in e.outputs),
                    self._value(e.context),
                )
            )
        parts.append(tuple(map(atom, graph.outputs)))
        return self._intern(tuple(parts))

    def _intern(self, key: Hashable) -> int:
        return self._interned.setdefault(key, len(self._interned))

    def _aval(self, aval: Any) -> Hashable:
        return (
            tuple(getattr(aval, "shape", ())),
            str(getattr(aval, "dtype", aval)),
            getattr(aval, "weak_type", False),
            getattr(aval, "sharding", None),
            memory_kind_of(aval),
        )

    def _constant(self, value: Any, aval: Any) -> Hashable:
        try:
            array = np.asarray(value)
        except TypeError:  # typed PRNG keys have no NumPy form
            return _Same(value)
        return ("constant", self._aval(aval), array.tobytes())

    def _params(self, primitive: Any, params: Mapping[str, Any]) -> Hashable:
        return tuple((k, self._value(v)) for k, v in telling(primitive, params))

    def _value(self, value: Any) -> Hashable:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
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
        known = self._jaxprs.get(id(jaxpr))
        if known is not None:
            return ("jaxpr", known[1])
        inner = opened(jaxpr)
        numbers: dict[Any, int] = {}

        def number(v: Any) -> int:
            return numbers.setdefault(v, len(numbers))

        def atom(a: Any) -> Hashable:
            return self._constant(a.val, a.aval) if isinstance(a, jex_core.Literal) else number(a)

        variables = [*inner.constvars, *inner.invars]
        parts: list[Hashable] = [
            tuple((number(v), self._aval(v.aval)) for v in variables),
            tuple(self._constant(c, getattr(c, "aval", None)) for c in getattr(jaxpr, "consts", ())),
        ]
        for e in inner.eqns:
            parts.append(
                (
                    e.primitive,
                    self._params(e.primitive, e.params),
                    tuple(map(atom, e.invars)),
                    tuple((number(v), self._aval(v.aval)) for v in e.outvars),
                    self._value(e.ctx),
                )
            )
        parts.append(tuple(map(atom, inner.outvars)))
        key = self._intern(tuple(parts))
        self._jaxprs[id(jaxpr)] = (jaxpr, key)  # the reference keeps the identity from being reused
        return ("jaxpr", key)
