"""Functions that are traced once, and of which any part runs alone: the one that some results need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.ir import Atom, Graph, everywhere, from_jaxpr, prune, values

__all__ = ["Function", "Part", "rounding_of", "trace"]


@dataclass(frozen=True, eq=False)
class Part:
    """What computes the results `makes` from the arguments `reads`, both by their names."""

    graph: Graph
    reads: tuple[Hashable, ...]
    makes: tuple[Hashable, ...]
    captured: Mapping[Hashable, Any]

    def __call__(self, arguments: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the results by their names."""
        given = iter(arguments[name] for name in self.reads)
        operands = [self.captured[value] if value in self.captured else next(given) for value in self.graph.inputs]
        return dict(zip(self.makes, self.graph.run(*operands), strict=True))


@dataclass(frozen=True, eq=False)
class Function:
    """A traced function. Its graph's inputs have names, but for arrays that it has captured."""

    graph: Graph
    names: Mapping[Any, Hashable]
    captured: Mapping[Any, Any]
    results: Mapping[Hashable, Atom]

    def part(self, makes: Iterable[Hashable]) -> Part:
        """Return what computes these results."""
        makes = tuple(makes)
        outputs = tuple(self.results[name] for name in makes)
        # What the step prints is no result: no part of it waits for a print of another.
        equations = tuple(e for e in self.graph.equations if e.outputs)
        graph = prune(replace(self.graph, equations=equations, outputs=outputs))
        read = {*values(outputs), *(v for e in graph.equations for v in values(e.inputs))}
        inputs = tuple(value for value in graph.inputs if value in read)
        reads = tuple(self.names[value] for value in inputs if value not in self.captured)
        return Part(replace(graph, inputs=inputs), reads, makes, self.captured)


def trace(function: Callable[[dict[Any, Any]], dict[Any, Any]], arguments: Mapping[Any, Any]) -> Function:
    """Trace a function of named arrays; `arguments` has their types. It returns named arrays.

    Example:
      >>> types = {name: jax.ShapeDtypeStruct((2,), "float32") for name in "abc"}
      >>> found = trace(lambda x: {"sum": x["a"] + x["b"], "product": x["b"] * x["c"]}, types)
      >>> found.part(["product"]).reads
      ('b', 'c')
      >>> found.part(["sum"])({"a": 1.0, "b": 2.0})
      {'sum': 3.0}
    """
    names: list[Hashable] = []

    def run(given: list[Any]) -> list[Any]:
        made = function(dict(zip(arguments, given, strict=True)))
        names[:] = made
        return list(made.values())

    graph, captured = from_jaxpr(jax.make_jaxpr(run)(list(arguments.values())))
    own, others = graph.inputs[: len(captured)], graph.inputs[len(captured) :]
    return Function(
        graph,
        dict(zip(others, arguments, strict=True)),
        dict(zip(own, captured, strict=True)),
        dict(zip(names, graph.outputs, strict=True)),
    )


def rounding_of(*parts: Part) -> float:
    """Return the unit of rounding, relative to 1, of the narrowest type of float that these compute with."""
    found = {
        np.dtype(getattr(getattr(v, "aval", None), "dtype", np.int32))
        for part in parts
        for equation in everywhere(part.graph)
        for v in getattr(equation, "outputs", None) or equation.outvars
        if not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
    }
    return max((float(jnp.finfo(of).eps) for of in found if jnp.issubdtype(of, jnp.floating)), default=0.0)
