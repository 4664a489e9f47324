"""The inputs of a loop body that are data: sliced by the microbatch's index. Other inputs are parameters."""

from __future__ import annotations

from jaxpp_flax.engine.tracing.ir import Value, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody

__all__ = ["sliced_by_index"]


def sliced_by_index(body: LoopBody) -> set[Value]:
    """Return the inputs that a body slices by the microbatch's index."""
    moving: set[Value] = {body.index}
    found: set[Value] = set()
    for equation in body.equations:
        operands = values(equation.inputs)
        if moving.isdisjoint(operands):
            continue
        if equation.name in ("dynamic_slice", "gather"):
            found.update(v for v in operands if v not in moving)
        elif all(v.aval.ndim == 0 for v in operands):
            moving.update(equation.outputs)
    return found
