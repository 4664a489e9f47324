"""Matrix products in a wider type than a model is to compute in: a layer that names a `dtype` keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util

from jaxpp_flax.engine.analyses.work import work_of
from jaxpp_flax.engine.tracing.ir import Equation, Graph, bodies
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of

__all__ = ["wide_products"]

# A head or a router in float32 is usual; a model most of whose work is in float32 is a mistake.
_MOST = 0.5


def wide_products(graph: Graph, compute: Any) -> str | None:
    """Return in words how many products have a wider type than `compute`, and where; None unless most of them do."""
    total, wide, first = 0.0, 0.0, ""
    for equation, flops in _products(graph.equations, 1):
        inputs = equation.inputs if isinstance(equation, Equation) else equation.invars
        types = {a.aval.dtype for a in inputs if jnp.issubdtype(a.aval.dtype, jnp.floating)}
        total += flops
        if wider := [of for of in types if of.itemsize > jnp.dtype(compute).itemsize]:
            wide += flops
            source = equation.source if isinstance(equation, Equation) else equation.source_info
            first = first or f"{wider[0]}: {source_info_util.summarize(source) if source else 'unknown'}"
    if wide <= _MOST * total:
        return None
    share = f"{wide / total:.0%} of the operations of the model's matrix products"
    return f"{share} are in a wider type (the first {first})"


def _products(equations: Iterable[Any], turns: int) -> Iterator[tuple[Any, float]]:
    """Yield each product, at any depth, with its floating-point operations in all turns of the loops around it."""
    for equation in equations:
        inner = bodies(equation.params)
        for jaxpr in inner:
            more = equation.params["length"] if equation.primitive.name == "scan" else 1
            yield from _products(jaxpr.eqns, turns * more)
        if not inner and facts_of(equation.primitive).cost is Cost.PRODUCT:
            yield equation, turns * work_of(equation, 0.0)
