"""Choices: results that jump where a float moves a little: arg-max, top-k, comparisons, casts to integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import jax.numpy as jnp
from jax.extend import source_info_util

from jaxpp_flax.engine.tracing.inline import is_recomputation
from jaxpp_flax.engine.tracing.ir import Equation, Graph, bodies, inside, prune
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.verify.rounding import is_float

__all__ = ["Places", "choice_places", "chosen", "hidden_choices", "num_gradients"]

Places: TypeAlias = frozenset[tuple[str, str]]
"""The primitives, and the user's lines, of choices."""


def num_gradients(num_results: int, num_carry: int, parameters: Sequence[str]) -> int:
    """Return how many of a loop's results are gradients, its last ones: one for each parameter, or none."""
    return len(parameters) if num_results - num_carry >= len(parameters) else 0


def choice_places(flat: Graph, num_carry: int, parameters: Sequence[str]) -> Places:
    """Return where a loop's opened body makes choices on which more depends than gradients of these parameters.

    What derivatives alone compare, such as the side of a ReLU, is none; nor is what depends on keys alone, such as the
    mask of a dropout; nor one of the `hidden_choices`.
    """
    count = len(flat.outputs)
    forward = prune(replace(flat, outputs=flat.outputs[: count - num_gradients(count, num_carry, parameters)]))
    moving, found = {value for value in forward.inputs if is_float(value.aval)}, set[tuple[str, str]]()
    for e in forward.equations:
        if not moving.isdisjoint(e.inputs):
            moving.update(e.outputs)
            if _made_by(forward, e):
                found.add((e.name, e.where))
    return frozenset(found)


def hidden_choices(flat: Graph) -> frozenset[str]:
    """Return the names of an opened body's choices, comparisons aside, that a `scan`, `cond` or `while` recomputes."""
    opaque = (e for e in flat.equations if bodies(e.params))
    regions = (region for e in opaque for region in inside(e.params) if is_recomputation(region))
    return frozenset(
        f"{e.primitive.name} at {source_info_util.summarize(e.source_info)}"
        for region in regions
        for e in inside(region.params)
        if not bodies(e.params)
        and any(is_float(v.aval) for v in e.invars)
        and any(jnp.issubdtype(v.aval.dtype, jnp.integer) for v in e.outvars)
    )


def chosen(graph: Graph, equation: Equation, places: Places) -> tuple[int, ...]:
    """Return which results of an equation at one of the places are choices that something reads."""
    return _made_by(graph, equation) if places and (equation.name, equation.where) in places else ()


def _made_by(graph: Graph, equation: Equation) -> tuple[int, ...]:
    jumps = facts_of(equation.primitive).jumps
    if jumps is False or bodies(equation.params) or not any(is_float(atom.aval) for atom in equation.inputs):
        return ()
    results = enumerate(equation.outputs)
    return tuple(i for i, value in results if graph.reads[value] and (jumps or not is_float(value.aval)))
