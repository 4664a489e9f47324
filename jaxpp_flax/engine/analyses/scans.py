"""Open a scan: its body as a graph; and make a new scan from a changed body.

Versions of JAX differ in how a scan separates its constants, carry and slices. In all versions, the numbers of
dimensions of the scan's operands and of its body's arguments tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit

__all__ = ["Scan", "open_scan", "scan_again"]


@dataclass(frozen=True)
class Scan:
    """A scan's body, calls inlined: its inputs are constants, carry, slices; its outputs are carry, slices."""

    body: Graph
    num_consts: int
    num_carry: int

    @property
    def carry_in(self) -> tuple[Value, ...]:
        """The body's inputs that are its carry."""
        return self.body.inputs[self.num_consts : self.num_consts + self.num_carry]


def open_scan(equation: Equation) -> Scan:
    """Return the parts of a `scan` equation."""
    body = body_of(equation, remat=True)
    sliced = sum(a.aval.ndim > v.aval.ndim for a, v in zip(equation.inputs, body.inputs, strict=True))
    carried = sum(v.aval.ndim == a.aval.ndim for v, a in zip(equation.outputs, body.outputs, strict=True))
    return Scan(body, len(body.inputs) - carried - sliced, carried)


def scan_again(
    equation: Equation, scan: Scan, inputs: Sequence[Atom], outputs: Sequence[Value | None]
) -> tuple[list[Equation], list[Atom]]:
    """Make a scan like `equation` over another body.

    Args:
      equation: gives length, direction, place and labels.
      scan: the parts to use.
      inputs: the operands.
      outputs: the values of the results; None for a new value.

    Returns:
      The equations, and the values of the results.
    """
    first, second = scan.num_consts, scan.num_consts + scan.num_carry

    def run(*operands: Any) -> list[Any]:
        consts = operands[:first]

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = scan.body.run(*consts, *carry, *xs)
            return tuple(results[: scan.num_carry]), tuple(results[scan.num_carry :])

        carry, stacked = jax.lax.scan(
            body, operands[first:second], operands[second:], equation.params["length"],
            reverse=equation.params["reverse"], unroll=equation.params["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    return emit(run, inputs, outputs, like=equation)
