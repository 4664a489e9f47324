"""Regions of `jax.checkpoint` whose equations stand open in a graph, and the barriers that keep them recomputed.

JAX puts a barrier in front of what a backward recomputes: over the values that it starts from, and over the cotangents.
Without it, XLA merges what is recomputed with the original, or recomputes all regions at once and holds their values
together. A call of `jax.checkpoint` brings its barrier along; an opened region gets one from `shielded`, in each task
that has a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values

__all__ = ["Region", "is_barrier", "shielded"]


@dataclass(frozen=True, eq=False)
class Region:
    """What a backward recomputes in one piece: a region of `jax.checkpoint`, or its part between two marks.

    Attributes:
      saves: a policy saves some of the values in it.
      prevents_cse: it has a barrier (`prevent_cse=` of `jax.checkpoint`).
    """

    saves: bool
    prevents_cse: bool = True


def is_barrier(equation: Equation) -> bool:
    """Return whether an equation is `jax.lax.optimization_barrier`."""
    return equation.primitive is _barrier()


@cache
def _barrier() -> Any:
    """Return the primitive, which has no public name."""
    (equation,) = jax.make_jaxpr(jax.lax.optimization_barrier)(1.0).eqns
    return equation.primitive


def shielded(graph: Graph, *, always: bool = False) -> Graph:
    """Return the graph with a barrier in front of the recomputed equations of each opened region.

    The barrier is over the values from outside that they read, and over the cotangents that meet their results: the
    region is recomputed once its backward can begin. Constants stay outside: XLA writes what enters a barrier, such as
    zeros as large as the scores of attention.

    Args:
      graph: the graph of a task, or of a loop's body.
      always: also for regions with `prevent_cse=False`. The original may stand in the same graph.
    """
    regions = dict.fromkeys(e.region for e in graph.equations if e.late and e.region is not None)
    for region in regions:
        if always or region.prevents_cse:
            graph = _with_barrier(graph, region)
    return graph


def _with_barrier(graph: Graph, region: Region) -> Graph:
    recomputed = {e for e in graph.equations if e.late and e.region is region}
    outputs = {v for e in recomputed for v in e.outputs}
    after, given = _computed_from(graph, outputs), _computed_from(graph, set(graph.inputs))
    readers = {e for e in graph.equations if not e.late and not outputs.isdisjoint(e.inputs)}
    changed = [e for e in graph.equations if e in recomputed or e in readers]
    entering = [v for v in dict.fromkeys(v for e in changed for v in values(e.inputs)) if v in given - after]
    if not entering:
        return graph
    barrier = Equation(_barrier(), {}, tuple(entering), tuple(Value(v.aval) for v in entering), transposed=True)
    shown: dict[Atom, Value] = dict(zip(entering, barrier.outputs, strict=True))
    ahead: list[Equation] = []
    behind: list[Equation] = []
    for equation in graph.equations:
        if equation in recomputed or equation in readers:
            behind.append(equation.reading(tuple(shown.get(atom, atom) for atom in equation.inputs)))
        else:
            (ahead if after.isdisjoint(equation.outputs) else behind).append(equation)
    return Graph(graph.inputs, graph.outputs, (*ahead, barrier, *behind))


def _computed_from(graph: Graph, start: set[Value]) -> set[Value]:
    """Return some values, and all that are computed from them."""
    computed = set(start)
    for equation in graph.equations:
        if not computed.isdisjoint(equation.inputs):
            computed.update(equation.outputs)
    return computed
