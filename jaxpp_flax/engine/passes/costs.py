"""Estimate what each block of a loop body costs, before it is cut: floating-point operations from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex_core

from jaxpp_flax.engine.ir import Equation, Graph
from jaxpp_flax.engine.markers import Mark
from jaxpp_flax.engine.passes.label import label

__all__ = ["flops", "with_costs"]


def flops(equation: Any) -> float:
    """Floating-point operations of one equation (of a graph or of a jaxpr), inner jaxprs included.

    Contractions count two for each multiply-add; anything else counts one for each element of its results. A `while`
    counts one turn, since its length is unknown.
    """
    name = equation.primitive.name
    params = equation.params
    operands = [a.aval for a in (equation.inputs if isinstance(equation, Equation) else equation.invars)]
    results = [v.aval for v in (equation.outputs if isinstance(equation, Equation) else equation.outvars)]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * _size(results[0]) * math.prod(operands[0].shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = operands[1].shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(results[0]) * math.prod(kernel) / max(out_features, 1)
    inner = [getattr(j, "jaxpr", j) for j in jex_core.jaxprs_in_params(dict(params))]
    if inner:
        turns = params.get("length", 1) if name == "scan" else 1
        costs = [sum(map(flops, jaxpr.eqns)) for jaxpr in inner]
        return turns * (max(costs) if name == "cond" else sum(costs))
    return float(sum(map(_size, results)))


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0))


def with_costs(
    body: Graph, num_consts: int, num_carry: int, markers: Sequence[Equation], marks: Sequence[Mark]
) -> list[Mark]:
    """The marks with the cost of the block that each one ends: forward and backward of one microbatch, in FLOPs.

    The last mark also tells the cost of what follows it (`cost_after`).
    """
    if not marks:
        return []
    labels = label(body, num_consts, num_carry, markers, range(len(markers)))
    stages = len(markers) + 1
    costs = [0.0] * stages
    for equation, phase in labels.phase.items():
        costs[phase if phase < stages else 2 * stages - 1 - phase] += flops(equation)
    found = [replace(mark, cost=cost) for mark, cost in zip(marks, costs, strict=False)]
    found[-1] = replace(found[-1], cost_after=costs[-1])
    return found
