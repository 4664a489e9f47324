"""A trainer's step as a graph, with the points at which both sides are looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, from_jaxpr, values
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.verify.runs.choices import choice_places, open_choices
from jaxpp_flax.verify.runs.points import Look, Point, looks_in

__all__ = ["OpenedLoop", "TracedStep", "trace_step"]


@dataclass(frozen=True, eq=False)
class OpenedLoop:
    """A loop, with its calls opened as the compiler does: marks and choices stand at the top of its `body`.

    `given` is the body for given choices. `inside` are the looks at marks and choices, `results` those at the body's
    results.
    """

    equation: Equation
    body: Graph
    given: Graph
    inside: tuple[Look, ...]
    results: tuple[Look, ...]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step as a graph of `constants` and of the leaves of its arguments; its results have the structure `results`.

    `scalars` are those that operations make of arrays outside of the loops, such as norms.
    """

    graph: Graph
    constants: tuple[Any, ...]
    results: Any
    loops: tuple[OpenedLoop, ...]
    scalars: Mapping[Value, Point]


def trace_step(step: Callable[..., Any], parameters: Sequence[str], *arguments: Any) -> TracedStep:
    """Trace a step for such arguments. `parameters` are the paths of the parameters that have gradients."""
    jaxpr, results = jax.make_jaxpr(step, return_shape=True)(*arguments)
    graph, constants = from_jaxpr(jaxpr)
    loops: list[OpenedLoop] = []
    scalars: dict[Value, Point] = {}
    counts = Counter[Any]()
    for equation in graph.equations:
        if equation.primitive is treduce_p:
            loops.append(_opened(len(loops), equation, parameters))
        elif any(value.aval.ndim for value in values(equation.inputs)):
            name = (f"{equation.name} at {equation.where}", len(loops))
            for value in equation.outputs:
                if not value.aval.ndim:
                    scalars[value] = Point("scalar", *name, occurrence=counts[name])
                    counts[name] += 1
    return TracedStep(graph, tuple(constants), jax.tree.structure(results), tuple(loops), scalars)


def _opened(number: int, equation: Equation, parameters: Sequence[str]) -> OpenedLoop:
    body, num_carry = equation.params["body"], equation.params["num_carry"]
    flat = inline(body, flatten=True, remat=True)
    places = choice_places(flat, num_carry, parameters)
    shown, given, choices = open_choices(flat if places else inline(body), places)
    looks = tuple(looks_in(number, shown, choices, num_carry, parameters))
    begin = len(looks) - len(body.outputs)
    return OpenedLoop(equation, shown, given, looks[:begin], looks[begin:])
