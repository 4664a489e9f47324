"""The canonical form of a graph: values by number, and only the facts that change results.

`Fingerprinter` and `describe_graph` read it. An inner jaxpr has the form of its graph (see `from_jaxpr`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, memory_kind_of
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = [
    "COSMETIC", "CanonicalForm", "Operand", "Result", "TypeFacts", "canonical_form", "is_jaxpr", "telling_params",
    "type_facts",
]  # fmt: skip

# The attribute in which one of our own primitives lists its cosmetic parameters.
COSMETIC = "cosmetic_parameters"


class TypeFacts(NamedTuple):
    """The facts of a type that a program depends on."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    sharding: Any
    memory_kind: str | None


# The number of a value, or a literal; and the number of a new value with its type.
Operand: TypeAlias = "int | Constant"
Result: TypeAlias = tuple[int, TypeFacts]


class CanonicalEquation(NamedTuple):
    """An equation over numbered values."""

    equation: Equation
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]


class CanonicalForm(NamedTuple):
    """A graph over values that are numbered in the order of their definition."""

    inputs: tuple[Result, ...]
    equations: list[CanonicalEquation]
    outputs: tuple[Operand, ...]


def canonical_form(graph: Graph) -> CanonicalForm:
    numbers: dict[Value, int] = {}

    def operands(atoms: Sequence[Atom]) -> tuple[Operand, ...]:
        return tuple([a if isinstance(a, Constant) else numbers.setdefault(a, len(numbers)) for a in atoms])

    def results(made: Sequence[Value]) -> tuple[Result, ...]:
        return tuple([(numbers.setdefault(v, len(numbers)), type_facts(v.aval)) for v in made])

    inputs = results(graph.inputs)
    equations = [CanonicalEquation(e, operands(e.inputs), results(e.outputs)) for e in graph.equations]
    return CanonicalForm(inputs, equations, operands(graph.outputs))


@lru_cache(maxsize=4096)  # a large step has thousands of values of a few types
def type_facts(aval: Any) -> TypeFacts:
    """Return the facts of a type; another object than a type stands for its own dtype."""
    return TypeFacts(
        tuple(getattr(aval, "shape", ())),
        str(getattr(aval, "dtype", aval)),
        getattr(aval, "weak_type", False),
        getattr(aval, "sharding", None),
        memory_kind_of(aval),
    )


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter is a jaxpr, with or without its captured arrays."""
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def telling_params(equation: Equation) -> list[tuple[str, Any]]:
    """Return the parameters that change an equation's results, sorted by name."""
    cosmetic = facts_of(equation.primitive).unread or getattr(equation.primitive, COSMETIC, ())
    return [(k, v) for k, v in sorted(equation.params.items()) if k not in cosmetic and not _is_debug_info(v)]


def _is_debug_info(value: Any) -> bool:
    # JAX's class for it is private; it holds names and places of source files, under `debug_info` or another name.
    return type(value).__name__ == "DebugInfo" and type(value).__module__.startswith("jax.")
