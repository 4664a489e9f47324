"""The pipeline's side: the trainer's step with more results, so that it returns what crosses its marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit
from jaxpp_flax.engine.tracing.treduce import Concat
from jaxpp_flax.verify.runs.points import AGAIN, Look, Point
from jaxpp_flax.verify.runs.traced_step import OpenedLoop, trace_step

__all__ = ["WatchedStep"]


class WatchedStep:
    """A function to compile in place of a training step: it returns `(state, (metrics, watched arrays))`.

    Each loop stacks what crosses its marks, one more result of its body, on the rank that makes it. So the arrays come
    out of the same passes, schedules, transfers and runtime as those of the step itself.

    Attributes:
      step: the training step.
      points: those of the watched arrays, once the step is traced.
    """

    def __init__(self, step: Callable[..., Any], parameters: Sequence[str]) -> None:
        self.step, self._parameters = step, parameters
        self.points: tuple[Point, ...] = ()

    def __call__(self, state: Any, batch: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        """Trace the step, and run its graph with more results."""
        traced = trace_step(self.step, self._parameters, state, batch)
        watching = {loop.equation: _watching(loop) for loop in traced.loops}
        watched = dict(traced.scalars)
        for loop in traced.loops:
            points = [look.point for look in (*loop.results, *loop.inside)]
            watched |= dict(zip(watching[loop.equation].outputs, points, strict=True))
        self.points = tuple(watched.values())
        graph = replace(
            traced.graph,
            equations=tuple(watching.get(equation, equation) for equation in traced.graph.equations),
            outputs=(*traced.graph.outputs, *watched),
        )
        found = graph.run(*traced.constants, *jax.tree.leaves((state, batch)))
        count = len(found) - len(watched)
        new, metrics = jax.tree.unflatten(traced.results, found[:count])
        return new, (metrics, found[count:])


def _watching(loop: OpenedLoop) -> Equation:
    """Return a loop that returns what crosses its marks, too, stacked."""
    equation, params = loop.equation, loop.equation.params
    equations = list(loop.body.equations)
    crossed = [_in_place(loop.body, look, equations) for look in loop.inside]
    body = replace(loop.body, outputs=(*loop.body.outputs, *crossed), equations=tuple(equations))
    operations = (*params["operations"], *[Concat()] * len(crossed))
    return replace(
        equation,
        params={
            **params,
            "body": body,
            "operations": operations,
            "partial_over": (*params["partial_over"], *[frozenset()] * len(crossed)),
        },
        outputs=(*equation.outputs, *[Value(atom.aval) for atom in crossed]),
    )


def _in_place(body: Graph, look: Look, equations: list[Equation]) -> Atom:
    """Return the value looked at; what is recomputed stays in the backward task that needs it."""
    choosing = body.equations[look.position]
    reached = {*choosing.outputs}
    for equation in body.equations[look.position :] if look.point.kind in AGAIN else ():
        if equation is not choosing and reached.isdisjoint(equation.inputs):
            continue
        if equation.transposed:
            both = look.atom, equation.outputs[0]
            made, (value, _) = emit(lambda *arrays: jax.lax.optimization_barrier(arrays), both, like=equation)
            equations += made
            return value
        reached.update(equation.outputs)
    return look.atom
