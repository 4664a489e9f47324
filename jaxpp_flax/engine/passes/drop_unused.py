"""Drop unread results of a loop, with the work that makes them.

If the optimizer freezes a parameter (`optax.set_to_zero`), its gradient is neither computed nor accumulated.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, prune
from jaxpp_flax.engine.tracing.treduce import treduce_p

__all__ = ["drop_unused_results"]


def drop_unused_results(graph: Graph) -> Graph:
    """Return the same function; each of its loops returns only its carry and the results that are read."""
    return prune(graph, _narrowed)


def _narrowed(equation: Equation, needed: set[Value]) -> Equation:
    if equation.primitive is not treduce_p:
        return equation
    params = equation.params
    carries, body = params["num_carry"], params["body"]
    used = [k for k, v in enumerate(equation.outputs[carries:]) if v in needed]
    if len(used) == len(params["operations"]):
        return equation
    outputs = (*body.outputs[:carries], *(body.outputs[carries + k] for k in used))
    operations = tuple(params["operations"][k] for k in used)
    return replace(
        equation,
        params={**params, "body": prune(replace(body, outputs=outputs)), "operations": operations},
        outputs=(*equation.outputs[:carries], *(equation.outputs[carries + k] for k in used)),
    )
