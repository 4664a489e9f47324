"""Refuse steps that no pipeline can run."""

from __future__ import annotations

from jaxpp_flax.engine.analyses.partial_sums import refuse_partial_sums
from jaxpp_flax.engine.tracing.effects import refuse_ordered_effects
from jaxpp_flax.engine.tracing.ir import Graph

__all__ = ["check_supported"]


def check_supported(graph: Graph) -> Graph:
    """Check a graph, and return it unchanged.

    Raises:
      NotImplementedError: if a value is typed as a partial sum.
      ValueError: if a side effect has `ordered=True`.
    """
    refuse_partial_sums(graph)
    refuse_ordered_effects(graph)
    return graph
