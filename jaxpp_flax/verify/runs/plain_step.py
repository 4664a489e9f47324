"""The plain side: the trainer's step under `jax.jit`, one microbatch after another, with every point looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.ir import Graph, everywhere, from_jaxpr, struct_of
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.verify.runs.choices import choice_places, opened
from jaxpp_flax.verify.runs.crossings import Crossing, run_body
from jaxpp_flax.verify.runs.points import LoopPoints, Point, name_loop, points_of

__all__ = ["PlainStep", "Traced", "trace_step"]


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as a graph; its results have the structure `results`."""

    graph: Graph
    constants: tuple[Any, ...]
    results: Any

    @property
    def has_carry(self) -> bool:
        """True if a value goes from microbatch to microbatch: then these have an order."""
        loops = [e for e in self.graph.equations if e.primitive is treduce_p]
        return any(loop.params["num_carry"] for loop in loops)

    @property
    def rounding(self) -> float:
        """The unit of rounding, relative to 1, of the narrowest type of float that the step computes with."""
        graphs = [self.graph, *[e.params["body"] for e in self.graph.equations if e.primitive is treduce_p]]
        found = {
            np.dtype(getattr(getattr(v, "aval", None), "dtype", np.int32))
            for graph in graphs
            for equation in everywhere(graph)
            for v in getattr(equation, "outputs", None) or equation.outvars
            if not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        }
        return max((float(jnp.finfo(of).eps) for of in found if jnp.issubdtype(of, jnp.floating)), default=0.0)

    def run(self, leaves: Sequence[Any], loop: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> list[Any]:
        """Evaluate the step on the leaves of its arguments; `loop(equation, operands)` runs each loop."""

        def apply(equation: Any, *operands: Any) -> Sequence[Any]:
            return loop(equation, operands) if equation.primitive is treduce_p else equation.bind(*operands)

        return self.graph.run(*self.constants, *leaves, apply=apply)


def trace_step(step: Callable[..., Any], *arguments: Any) -> Traced:
    """Trace a step for such arguments."""
    jaxpr, results = jax.make_jaxpr(step, return_shape=True)(*arguments)
    graph, constants = from_jaxpr(jaxpr)
    return Traced(graph, tuple(constants), jax.tree.structure(results))


class PlainStep:
    """Runs a traced step on arguments and an order of the microbatches; returns an array for each point.

    `parameters` are the paths of the parameters that have gradients. Arrays of every microbatch, those that cross a
    mark and the summands of each gradient, are stacked in the order of the batch, whatever the order of the run.
    Choices in `forced` take the place of the step's own, which are returned all the same.
    """

    def __init__(self, traced: Traced, parameters: Sequence[str], forced: Mapping[Point, Any]) -> None:
        self._traced, self._parameters, self._forced = traced, parameters, forced
        self.loops: list[LoopPoints] = []  # known once the step is traced
        self._run = jax.jit(self._evaluate)

    def __call__(self, arguments: Any, order: Any) -> tuple[Any, dict[Point, Any], dict[Point, Any]]:
        """Return the results, the array of each point inside, and for results of loops those of each microbatch."""
        results, crossings, sums, parts = self._run(jax.tree.leaves(arguments), jnp.asarray(order, jnp.int32))
        crossed = [p for loop in self.loops for points in loop.crossings for p in points]
        summed = [p for loop in self.loops for p in loop.results]
        there = dict(zip(crossed, crossings, strict=True)) | dict(zip(summed, sums, strict=True))
        shown = jax.tree.unflatten(self._traced.results, results)
        return shown, there, {p: part for p, part in zip(summed, parts, strict=True) if part is not None}

    def _evaluate(self, leaves: Sequence[Any], order: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        self.loops = []
        crossings: list[Any] = []
        sums: list[Any] = []
        parts: list[Any] = []

        def loop(equation: Any, operands: Sequence[Any]) -> list[Any]:
            results, crossed, of_microbatches = self._loop(equation, operands, order)
            crossings.extend(crossed)
            sums.extend(results)
            parts.extend(of_microbatches)
            return results

        return self._traced.run(leaves, loop), crossings, sums, parts

    def _loop(self, equation: Any, operands: Sequence[Any], order: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the loop's results, what crosses each mark in every microbatch, and the results' summands."""
        params, body = equation.params, equation.params["body"]
        operations, num_carry, consts = params["operations"], params["num_carry"], operands[: params["num_consts"]]
        made = body.outputs[num_carry:]
        states = [op.state(params["length"], struct_of(y.aval)) for op, y in zip(operations, made, strict=True)]
        named: list[LoopPoints] = []
        places = choice_places(opened(body), num_carry, self._parameters)

        def one(state: tuple[list[Any], list[Any]], index: Any) -> Any:
            seen: list[Crossing] = []
            inputs = [*consts, index, *state[0]]

            def force(choice: Crossing, number: int) -> list[Any]:
                pairs = zip(points_of(choice, len(self.loops), number), choice.values, strict=True)
                own = [jnp.asarray(self._forced[p])[index] if p in self._forced else value for p, value in pairs]
                return own[len(own) - choice.num_chosen :]

            results, phases = run_body(body, inputs, [0] * len(inputs), seen, places=places, force=force)
            named[:] = [name_loop(len(self.loops), seen, phases, num_carry, self._parameters)]
            summands = results[num_carry:]
            new = [op.update(s, y, index) for op, s, y in zip(operations, state[1], summands, strict=True)]
            return (results[:num_carry], new), (summands, [list(crossing.values) for crossing in seen])

        carried = list(operands[params["num_consts"] :])
        (carry, reduced), stacked = jax.lax.scan(one, (carried, states), order)
        self.loops.append(named[0])
        summands, crossed = jax.tree.map(lambda x: x[jnp.argsort(order)], stacked)
        return [*carry, *reduced], jax.tree.leaves(crossed), [*[None] * num_carry, *summands]
