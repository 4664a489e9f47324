"""The pipeline's side: the trainer's step with more results, so that it returns what crosses its marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Graph, emit
from jaxpp_flax.engine.tracing.treduce import Concat, treduce_p
from jaxpp_flax.verify.runs.choices import choice_places, hidden_choices, opened
from jaxpp_flax.verify.runs.crossings import AGAIN, Crossing, crossings_at_top
from jaxpp_flax.verify.runs.points import LoopPoints, Point, name_loop
from jaxpp_flax.verify.runs.traced_step import trace_step

__all__ = ["WatchedStep"]


class WatchedStep:
    """A function to compile in place of a training step: it returns `(state, (metrics, watched arrays))`.

    Each loop stacks what crosses its marks, one more result of its body, on the rank that makes it. So the arrays come
    out of the same passes, schedules, transfers and runtime as those of the step itself.
    """

    def __init__(self, step: Callable[..., Any], parameters: Sequence[str]) -> None:
        self._step, self._parameters = step, parameters
        self._points: list[Point] = []
        self.hidden: set[str] = set()  # choices that are recomputed where they cannot be looked at

    def __call__(self, state: Any, batch: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        """Trace the step, and run its graph with more results."""
        traced = trace_step(self._step, state, batch)
        self._points = []
        watched: list[Any] = []

        def loop(number: int, equation: Any, operands: Sequence[Any]) -> list[Any]:
            results, stacked, points = self._loop(equation, operands, number)
            watched.extend([*stacked, *results])
            self._points += [*[p for of_mark in points.crossings for p in of_mark], *points.results]
            return results

        def scalar(point: Point, value: Any) -> Any:
            watched.append(value)
            self._points.append(point)
            return value

        found = traced.run(jax.tree.leaves((state, batch)), loop, scalar)
        new, metrics = jax.tree.unflatten(traced.results, found)
        return new, (metrics, watched)

    def _loop(self, equation: Any, operands: Sequence[Any], number: int) -> tuple[list[Any], list[Any], LoopPoints]:
        params = equation.params
        flat = opened(params["body"])
        places = choice_places(flat, params["num_carry"], self._parameters)
        self.hidden |= hidden_choices(flat)
        body = flat if places else inline(params["body"])
        seen = crossings_at_top(body, places)
        equations = list(body.equations)
        crossed = [value for crossing in seen for value in _in_place(body, crossing, equations)]
        watching = {
            **params,
            "body": replace(body, outputs=(*body.outputs, *crossed), equations=tuple(equations)),
            "operations": (*params["operations"], *[Concat()] * len(crossed)),
        }
        found = treduce_p.bind(*operands, **watching)
        count = len(found) - len(crossed)
        phases = [0] * len(body.outputs)  # the plain side knows them
        points = name_loop(number, seen, phases, params["num_carry"], self._parameters)
        return found[:count], found[count:], points

    def at_points(self, watched: Sequence[Any]) -> dict[Point, Any]:
        """Return the watched arrays of a run by their points."""
        return dict(zip(self._points, watched, strict=True))


def _in_place(body: Graph, crossing: Crossing, equations: list[Any]) -> Sequence[Atom]:
    """Return the values of a crossing; what is recomputed stays in the backward task that needs it."""
    reached = set(crossing.values[len(crossing.values) - crossing.num_chosen :])
    for equation in body.equations[crossing.region :] if crossing.direction == AGAIN else ():
        if reached.isdisjoint(equation.inputs):
            continue
        if equation.transposed:
            beside = [*crossing.values, equation.outputs[0]]
            made, values = emit(lambda *arrays: jax.lax.optimization_barrier(arrays), beside, like=equation)
            equations += made
            return values[:-1]
        reached.update(equation.outputs)
    return crossing.values
