"""Drop unread results of a loop, with the work that makes them.

If the optimizer freezes a parameter (`optax.set_to_zero`), its gradient is neither computed nor accumulated.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, prune, values
from jaxpp_flax.engine.tracing.treduce import treduce_p

__all__ = ["drop_unused_results"]


def drop_unused_results(graph: Graph) -> Graph:
    """Return the same function; each of its loops returns only its carry and the results that are read."""
    needed = set(values(graph.outputs))
    kept: list[Equation] = []
    for equation in reversed(graph.equations):
        if not equation.effects and needed.isdisjoint(equation.outputs):
            continue
        if equation.primitive is treduce_p:
            equation = _narrow(equation, needed)
        kept.append(equation)
        needed.update(values(equation.inputs))
    return replace(graph, equations=tuple(reversed(kept)))


def _narrow(equation: Equation, needed: set[Value]) -> Equation:
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
