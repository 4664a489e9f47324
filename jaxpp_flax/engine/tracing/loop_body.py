"""The body of a loop over microbatches, opened: its inputs and outputs by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.markers import FORWARD, Mark, marker_p
from jaxpp_flax.engine.tracing.treduce import AddOp, Op

__all__ = ["LoopBody", "sliced_by_index"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopBody(Graph):
    """The work of one microbatch: a graph of `(constants, index, carry) -> (next_carry, results)`.

    `operations` are the reductions of the results over the `length` microbatches, one for each result. `carry_names`
    are the paths of the carry's leaves, for messages. `numbers` are the values that hold the parts of a single number,
    one for each shard of the batch. `partial_over` are, for each output, the mesh axes over which the step's own types
    kept it as partial sums (`jax.P(unreduced=)`).
    """

    num_consts: int
    num_carry: int
    operations: tuple[Op, ...]
    length: int
    carry_names: tuple[str, ...] = ()
    numbers: frozenset[Value] = frozenset()
    partial_over: tuple[frozenset[str], ...] = ()

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
            partial_over=params.get("partial_over", (frozenset(),) * len(graph.outputs)),
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
        """The forward markers that cut together, one tuple for each mark; see `_cut_groups`."""
        names = [e.params["name"] for e in self.forward_markers if e.params["closes_block"]]
        if len({*names}) == len(names):
            return tuple((marker,) for marker in self.forward_markers)
        sliced = sliced_by_index(self.equations, self.index)
        return _cut_groups(self.equations, [v for v in self.constants if v not in sliced and v.aval.size > 1])

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


def _cut_groups(equations: Sequence[Equation], weights: Sequence[Value]) -> tuple[tuple[Equation, ...], ...]:
    """Return the forward markers in groups that cut together, in the order of their first markers.

    A loss may call a model twice with nothing between the calls: on two texts, or with its adapters off. In program
    order the calls follow one another, but both need the block's weights. If the marker of the second call cut on its
    own, the second pass would be a second half of the pipeline, and each weight would be on two stages.

    Two markers are of one group if they close blocks of one name, follow the same groups and thus not one another, and
    close blocks that read a common weight. So a block that is called again on its own result cuts again.

    Args:
      equations: of a loop's body, in program order.
      weights: the constants of the loop that may be parameters.
    """
    number = {weight: k for k, weight in enumerate(weights)}
    groups: list[list[Equation]] = []
    firsts: list[tuple[object, int, int]] = []  # of each group: the block's name; the groups and weights behind it
    groups_behind: dict[Value, int] = {}  # sets as bits of a number: a body has many values
    weights_behind: dict[Value, int] = {}  # those since the last marker
    for equation in equations:
        groups_read = weights_read = 0
        for value in values(equation.inputs):
            groups_read |= groups_behind.get(value, 0)
            weights_read |= weights_behind.get(value, 0) | (1 << number[value] if value in number else 0)
        if equation.primitive is marker_p and equation.params["direction"] == FORWARD:
            name = equation.params["name"] if equation.params["closes_block"] else None
            group = next(
                (k for k, first in enumerate(firsts) if _is_beside(first, name, groups_read, weights_read)), -1
            )
            if group < 0:
                group = len(groups)
                groups.append([])
                firsts.append((name, groups_read, weights_read))
            groups[group].append(equation)
            groups_read, weights_read = groups_read | 1 << group, 0
        for value in equation.outputs:
            groups_behind[value], weights_behind[value] = groups_read, weights_read
    return tuple(map(tuple, groups))


def _is_beside(first: tuple[object, int, int], name: object, groups_read: int, weights_read: int) -> bool:
    return name is not None and first[:2] == (name, groups_read) and bool(first[2] & weights_read)
