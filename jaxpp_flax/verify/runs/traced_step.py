"""A trainer's step as a graph, in which loops and scalars of arrays can be replaced."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, from_jaxpr, values
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.verify.runs.points import Point

__all__ = ["TracedStep", "trace_step"]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step as a graph; its results have the structure `results`."""

    graph: Graph
    constants: tuple[Any, ...]
    results: Any

    @property
    def loops(self) -> list[Equation]:
        """The loops over microbatches, in order."""
        return [equation for equation in self.graph.equations if equation.primitive is treduce_p]

    @cached_property
    def scalars(self) -> dict[Value, Point]:
        """The scalars that operations make of arrays, such as norms, with their points."""
        found: dict[Value, Point] = {}
        counts = Counter[Any]()
        for equation in self.graph.equations:
            loop = counts[treduce_p]
            if equation.primitive is treduce_p:
                counts[treduce_p] += 1
            elif any(value.aval.ndim for value in values(equation.inputs)):
                leaf = f"{equation.name} at {equation.where}"
                for value in equation.outputs if all(not value.aval.ndim for value in equation.outputs) else ():
                    found[value] = Point("scalar", leaf, loop, counts[loop, leaf])
                    counts[loop, leaf] += 1
        return found

    def run(
        self,
        leaves: Sequence[Any],
        loop: Callable[[int, Equation, Sequence[Any]], Sequence[Any]],
        scalar: Callable[[Point, Any], Any],
    ) -> list[Any]:
        """Evaluate the step on the leaves of its arguments.

        `loop(number, equation, operands)` returns the results of a loop; `scalar(point, value)` what takes the place of
        one of the `scalars`.
        """
        numbers = itertools.count()

        def apply(equation: Equation, *operands: Any) -> Sequence[Any]:
            if equation.primitive is treduce_p:
                return loop(next(numbers), equation, operands)
            results = zip(equation.outputs, equation.bind(*operands), strict=True)
            return [scalar(self.scalars[of], value) if of in self.scalars else value for of, value in results]

        return self.graph.run(*self.constants, *leaves, apply=apply)


def trace_step(step: Callable[..., Any], *arguments: Any) -> TracedStep:
    """Trace a step for such arguments."""
    jaxpr, results = jax.make_jaxpr(step, return_shape=True)(*arguments)
    graph, constants = from_jaxpr(jaxpr)
    return TracedStep(graph, tuple(constants), jax.tree.structure(results))
