"""Matrix products in a wider type than a model is to compute in: a layer that names a `dtype` keeps it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxpp_flax.engine.analyses.equation_facts import place_of
from jaxpp_flax.engine.analyses.work import products
from jaxpp_flax.engine.tracing.ir import Graph

__all__ = ["wide_products"]

# A head or a router in float32 is usual; a model most of whose work is in float32 is a mistake.
_MOST = 0.5


def wide_products(graph: Graph, compute: Any) -> str | None:
    """Return in words how many products have a wider type than `compute`, and where; None unless most of them do."""
    total, wide, first = 0.0, 0.0, ""
    for equation, operands, flops in products(graph.equations):
        types = {aval.dtype for aval in operands if jnp.issubdtype(aval.dtype, jnp.floating)}
        total += flops
        if wider := [of for of in types if of.itemsize > jnp.dtype(compute).itemsize]:
            wide += flops
            first = first or f"{wider[0]}: {place_of(equation)}"
    if wide <= _MOST * total:
        return None
    share = f"{wide / total:.0%} of the operations of the model's matrix products"
    return f"{share} are in a wider type (the first {first})"
