"""The results of a step and of its loops in their last form: each is read, and each is an array of its own.

If the optimizer freezes a parameter (`optax.set_to_zero`), its gradient is neither computed nor accumulated. Of two
results that are one value, one is a copy: a step that takes one of them donated must not end the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Equation,
    Graph,
    Value,
    VerificationError,
    emit,
    memory_kind_of,
    prune,
    values,
)
from jaxpp_flax.engine.tracing.treduce import treduce_p

__all__ = ["check_results", "normalise_results"]


def normalise_results(graph: Graph) -> Graph:
    """Return the same function without unread results of loops and the work for them, and with results apart.

    Arguments that are returned unchanged stay the caller's, as under `jax.jit`. Values in host memory stay shared.
    """
    seen: set[Atom] = set(graph.inputs)
    copies, outputs = list[Equation](), list[Atom]()
    for atom in graph.outputs:
        if isinstance(atom, Value) and atom in seen and atom not in graph.inputs and memory_kind_of(atom.aval) is None:
            copy, (atom,) = emit(jax.lax.copy_p.bind, [atom])
            copies += copy
        seen.add(atom)
        outputs.append(atom)
    return prune(replace(graph, outputs=tuple(outputs), equations=(*graph.equations, *copies)), _narrowed)


def check_results(step: Graph) -> None:
    """Check that results of loops are read, and results of the step apart."""
    for loop in step.equations:
        if loop.primitive is treduce_p and not all(v in step.reads for v in loop.outputs[loop.params["num_carry"] :]):
            raise VerificationError(f"nothing reads a result of the loop at {loop.where}")
    own = [v for v in values(step.outputs) if v not in step.inputs and memory_kind_of(v.aval) is None]
    if len({*own}) < len(own):
        raise VerificationError("two results of the step are one array")


def _narrowed(equation: Equation, needed: set[Value]) -> Equation:
    if equation.primitive is not treduce_p:
        return equation
    params = equation.params
    carries, body = params["num_carry"], params["body"]
    used = [k for k, v in enumerate(equation.outputs[carries:]) if v in needed]
    if len(used) == len(params["operations"]):
        return equation
    kept = [*range(carries), *(carries + k for k in used)]

    def narrow(body: Graph) -> Graph:
        return prune(replace(body, outputs=tuple(body.outputs[k] for k in kept)))

    narrowed: dict[str, Any] = {
        "body": narrow(body),
        "operations": tuple(params["operations"][k] for k in used),
        "partial_over": tuple(params["partial_over"][k] for k in kept),
    }
    if "bodies" in params:
        narrowed["bodies"] = tuple(map(narrow, params["bodies"]))
    return replace(
        equation,
        params={**params, **narrowed},
        outputs=(*equation.outputs[:carries], *(equation.outputs[carries + k] for k in used)),
    )
