"""The body of a loop over microbatches, opened: its inputs and outputs by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.tracing.cut_groups import cut_groups
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.markers import FORWARD, Mark, marker_p
from jaxpp_flax.engine.tracing.treduce import AddOp, Op

__all__ = ["LoopBody", "sliced_by_index"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopBody(Graph):
    """The work of one microbatch: a graph of `(constants, index, carry) -> (next_carry, results)`.

    `operations` are the reductions of the results over the `length` microbatches, one for each result. `carry_names`
    are the paths of the carry's leaves, for messages. `numbers` are the values that hold the parts of a single number,
    one for each shard of the batch.
    """

    num_consts: int
    num_carry: int
    operations: tuple[Op, ...]
    length: int
    carry_names: tuple[str, ...] = ()
    numbers: frozenset[Value] = frozenset()

    @classmethod
    def of(cls, graph: Graph, params: Mapping[str, Any]) -> LoopBody:
        """Make the body of a `treduce` equation from its graph and the equation's parameters."""
        return cls(
            inputs=graph.inputs,
            outputs=graph.outputs,
            equations=graph.equations,
            num_consts=params["num_consts"],
            num_carry=params["num_carry"],
            operations=params["operations"],
            length=params["length"],
            carry_names=params["carry_names"],
        )

    @property
    def constants(self) -> tuple[Value, ...]:
        """The operands that every microbatch reads."""
        return self.inputs[: self.num_consts]

    @property
    def index(self) -> Value:
        """The number of the microbatch, an int32 scalar."""
        return self.inputs[self.num_consts]

    @property
    def carry(self) -> tuple[Value, ...]:
        """The leaves of the carry that this microbatch reads."""
        return self.inputs[self.num_consts + 1 :]

    @property
    def next_carry(self) -> tuple[Atom, ...]:
        """The leaves of the carry that the next microbatch reads."""
        return self.outputs[: self.num_carry]

    @property
    def results(self) -> tuple[Atom, ...]:
        """The results of this microbatch."""
        return self.outputs[self.num_carry :]

    def rewritten(self, graph: Graph) -> LoopBody:
        """Return the same loop with another body."""
        return replace(self, inputs=graph.inputs, outputs=graph.outputs, equations=graph.equations)

    @cached_property
    def forward_markers(self) -> tuple[Equation, ...]:
        """The forward markers in program order."""
        return tuple(e for e in self.equations if e.primitive is marker_p and e.params["direction"] == FORWARD)

    @cached_property
    def cut_groups(self) -> tuple[tuple[Equation, ...], ...]:
        """The forward markers that cut together, one tuple for each mark; see `cut_groups`."""
        names = [e.params["name"] for e in self.forward_markers if e.params["closes_block"]]
        if len({*names}) == len(names):
            return tuple((marker,) for marker in self.forward_markers)
        sliced = sliced_by_index(self.equations, self.index)
        return cut_groups(self.equations, [v for v in self.constants if v not in sliced and v.aval.size > 1])

    @property
    def has_sums(self) -> bool:
        """Whether some result is added up over the microbatches, as gradients are."""
        return any(isinstance(operation, AddOp) for operation in self.operations)

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """The possible cuts, for an assignment of stages: one for the forward markers that cut together."""
        firsts = [group[0] for group in self.cut_groups]
        return tuple(Mark(e.params["name"], e.params["closes_block"], e.where) for e in firsts)


def sliced_by_index(equations: Iterable[Equation], index: Value) -> set[Value]:
    """Return the values that equations, with plain calls inlined, slice by the microbatch's index.

    An input of the loop that is sliced is data; the other inputs are parameters.
    """
    moving: set[Value] = {index}
    sliced: set[Value] = set()
    for equation in equations:
        operands = values(equation.inputs)
        if moving.isdisjoint(operands):
            continue
        if equation.name in ("dynamic_slice", "gather"):
            sliced.update(v for v in operands if v not in moving)
        elif all(v.aval.ndim == 0 for v in operands):
            moving.update(equation.outputs)
    return sliced
