"""Estimate the cost of each block of a loop body before it is cut: operations and moved bytes, from shapes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.tracing.ir import Equation, bodies
from jaxpp_flax.engine.tracing.loop_body import LoopBody

__all__ = ["Work", "flops", "moved_bytes", "work_of_blocks"]

# Views, or operations that their readers compute on the way.
_FREE = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "copy", "copy_p", "stop_gradient", "name",
     "stage_marker", "optimization_barrier", "slice"}
)  # fmt: skip
_READS_ITS_OPERANDS = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "sort", "scatter", "scatter-add", "scatter_add"}
)


@dataclass(frozen=True)
class Work:
    """The work of one microbatch in a block, forward and backward, in FLOPs (or in FLOPs that take the same time)."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward work together."""
        return self.forward + self.backward


def flops(equation: Any) -> float:
    """Count the floating-point operations of one equation (of a graph or of a jaxpr), inner jaxprs included.

    Contractions count two for each multiply-add; other equations count one for each element of their results. A `while`
    counts one turn, because its length is unknown.
    """
    return _work(equation, 0.0)


def moved_bytes(equation: Any) -> float:
    """Count the bytes that one equation without inner jaxprs reads and writes, if no fusion saves them.

    Contractions, sorts and scatters count operands and results, other equations their results; views count nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> [moved_bytes(e) for e in jax.make_jaxpr(lambda x: jnp.exp(x @ x).reshape(16))(x).jaxpr.eqns]
      [192.0, 64.0, 0.0]
    """
    name = equation.primitive.name
    if name in _FREE:
        return 0.0
    operands, results = _avals(equation)
    found = sum(map(_nbytes, results))
    if name in _READS_ITS_OPERANDS:
        found += sum(map(_nbytes, operands))
    return float(found)


def _work(equation: Any, flops_per_byte: float) -> float:
    """Return the FLOPs, or the FLOPs that could be done while the bytes are moved, if that is more."""
    name, params = equation.primitive.name, equation.params
    inner = bodies(params)
    if inner:
        turns = params.get("length", 1) if name == "scan" else 1
        costs = [sum(_work(e, flops_per_byte) for e in jaxpr.eqns) for jaxpr in inner]
        return turns * (max(costs) if name == "cond" else sum(costs))
    operands, results = _avals(equation)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        found = 2.0 * _size(results[0]) * math.prod(operands[0].shape[d] for d in contracted)
    elif name == "conv_general_dilated":
        kernel = operands[1].shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        found = 2.0 * _size(results[0]) * math.prod(kernel) / max(out_features, 1)
    else:
        found = float(sum(map(_size, results)))
    return max(found, flops_per_byte * moved_bytes(equation)) if flops_per_byte else found


def _avals(equation: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(equation, Equation):
        return [a.aval for a in equation.inputs], [v.aval for v in equation.outputs]
    return [a.aval for a in equation.invars], [v.aval for v in equation.outvars]


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0))


def _nbytes(aval: Any) -> int:
    return _size(aval) * int(getattr(getattr(aval, "dtype", None), "itemsize", 0))


def work_of_blocks(body: LoopBody, flops_per_byte: float = 0.0) -> tuple[Work, ...]:
    """Estimate the work of each block between the marks; the last block is the work after the last mark.

    Args:
      body: an inlined loop body.
      flops_per_byte: FLOPs in the time of moving one byte; 0 counts only operations.
    """
    labels = label(body, range(len(body.marks)))
    blocks = len(body.marks) + 1
    forward, backward = [0.0] * blocks, [0.0] * blocks
    for equation, phase in labels.phase.items():
        if phase < blocks:
            forward[phase] += _work(equation, flops_per_byte)
        else:
            backward[2 * blocks - 1 - phase] += _work(equation, flops_per_byte)
    return tuple(map(Work, forward, backward))
