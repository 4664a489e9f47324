"""The body of a loop over microbatches, opened: its inputs and outputs by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.markers import FORWARD, Mark, marker_p
from jaxpp_flax.engine.tracing.treduce import AddOp, Op

__all__ = ["LoopBody", "sliced_by_index"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopBody:
    """The work of one microbatch: `(constants, index, carry) -> (next_carry, results)`.

    Attributes:
      constants: the operands that every microbatch reads.
      index: the number of the microbatch, an int32 scalar.
      carry: the leaves of the carry that this microbatch reads.
      equations: the equations in executable order.
      next_carry: the leaves of the carry that the next microbatch reads.
      results: the results of this microbatch.
      operations: the reductions of the results of all microbatches, one for each result.
      length: number of microbatches.
      carry_names: the path of each carry leaf, for messages.
    """

    constants: tuple[Value, ...]
    index: Value
    carry: tuple[Value, ...]
    equations: tuple[Equation, ...]
    next_carry: tuple[Atom, ...]
    results: tuple[Atom, ...]
    operations: tuple[Op, ...]
    length: int
    carry_names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        graph: Graph,
        *,
        num_consts: int,
        num_carry: int,
        operations: Sequence[Op],
        length: int,
        carry_names: Sequence[str] = (),
        **_: Any,
    ) -> LoopBody:
        """Make the body of a `treduce` equation from its graph and the equation's parameters."""
        return cls(
            constants=graph.inputs[:num_consts],
            index=graph.inputs[num_consts],
            carry=graph.inputs[num_consts + 1 :],
            equations=graph.equations,
            next_carry=graph.outputs[:num_carry],
            results=graph.outputs[num_carry:],
            operations=tuple(operations),
            length=length,
            carry_names=tuple(carry_names) or tuple(f"[leaf {j}]" for j in range(num_carry)),
        )

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (*self.constants, self.index, *self.carry)

    @property
    def outputs(self) -> tuple[Atom, ...]:
        return (*self.next_carry, *self.results)

    @cached_property
    def graph(self) -> Graph:
        """The body as a function."""
        return Graph(self.inputs, self.outputs, self.equations)

    @cached_property
    def markers(self) -> tuple[Equation, ...]:
        """The forward markers in program order."""
        return tuple(e for e in self.equations if e.primitive is marker_p and e.params["direction"] == FORWARD)

    @property
    def has_sums(self) -> bool:
        """Whether some result is added up over the microbatches, as gradients are."""
        return any(isinstance(operation, AddOp) for operation in self.operations)

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """The forward markers, for an assignment of stages."""
        return tuple(Mark(e.params["name"], e.params["closes_block"], e.where) for e in self.markers)

    def rewritten(self, graph: Graph) -> LoopBody:
        """Return the same loop with another body over the same inputs."""
        carries = len(self.next_carry)
        return replace(
            self, equations=graph.equations, next_carry=graph.outputs[:carries], results=graph.outputs[carries:]
        )


def sliced_by_index(equations: Iterable[Equation], index: Value) -> set[Value]:
    """Return the values that equations, with plain calls inlined, slice by the microbatch's index.

    An input of the loop that is sliced is data; the other inputs are parameters.
    """
    moving: set[Value] = {index}
    found: set[Value] = set()
    for equation in equations:
        operands = values(equation.inputs)
        if moving.isdisjoint(operands):
            continue
        if equation.name in ("dynamic_slice", "gather"):
            found.update(v for v in operands if v not in moving)
        elif all(v.aval.ndim == 0 for v in operands):
            moving.update(equation.outputs)
    return found
