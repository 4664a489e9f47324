"""Side effects that a pipeline cannot keep."""

from __future__ import annotations

from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.engine.tracing.treduce import treduce_p

__all__ = ["refuse_ordered_effects"]


def refuse_ordered_effects(graph: Graph) -> None:
    """Refuse ordered effects: stages run at the same time, so there is no order over the whole step.

    Raises:
      ValueError: naming the equation and its line.
    """
    for equation in graph.equations:
        body = equation.params["body"].equations if equation.primitive is treduce_p else (equation,)
        for part in body:
            # JAX has no public names for these effects, only the names of their classes.
            if any(type(effect).__name__.startswith("Ordered") for effect in part.effects):
                raise ValueError(
                    f"the `{part.name}` at {part.where} has a side effect with ordered=True, but the stages of a "
                    "pipeline work on several microbatches at the same time, so that no order of the whole step "
                    "is kept. Leave out ordered=True: each call still happens once for each microbatch. Pass what "
                    "tells the calls apart (the microbatch's index, the layer's name) to the callback."
                )
