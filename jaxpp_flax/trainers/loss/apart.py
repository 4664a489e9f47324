"""Which values hold examples apart: each entry belongs to one example, or is a sum of such entries over the examples.

A mean or a sum that is made so is the same whatever examples share a batch, in whatever order: each example may be
repeated, and the batch be cut, at will. Here this is proved, with the dimensions that `batch_dimensions` finds: of what
the search cannot follow, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim
from jaxpp_flax.engine.tracing.ir import Equation, Value
from jaxpp_flax.engine.tracing.primitives import Operands, facts_of

__all__ = ["Apart"]

# These may read any entry of an operand that holds examples.
_OPAQUE = frozenset(["cond", "pallas_call", "scatter", "scatter-add", "scatter_add", "shard_map", "while"])


@dataclass
class Apart:
    """The values that hold examples apart; `shifted` are those that are a sum and something else, such as a penalty."""

    found: set[Value] = field(default_factory=set)
    shifted: set[Value] = field(default_factory=set)

    def note(
        self,
        equation: Equation,
        value: Value,
        dependent: set[Value],
        dims: Mapping[Value, BatchDim],
        targets: set[int | None],
        count: int,
    ) -> None:
        """Look at a result of an equation.

        Args:
          equation: an equation, and not a call of another function.
          value: the result.
          dependent: the values that depend on the examples.
          dims: the dimension that runs over the examples, of the values that have one.
          targets: the dimensions of the result, negative if summed, where those of the operands go.
          count: the number of examples.
        """
        operands = [a for a in equation.inputs if isinstance(a, Value) and a in dependent]
        if equation.name in _OPAQUE or any(a not in self.found for a in operands) or len(targets) > 1:
            return
        if all(a in dims for a in operands):
            if _moves_examples(equation, dims):
                return
            is_row = value in dims and value.aval.shape[dims[value][0]] % count == 0
            is_sum = value not in dims and any(target is not None and target < 0 for target in targets)
            if is_row or is_sum:
                self.found.add(value)
        elif not any(a in dims for a in operands) and value not in dims and _is_linear(equation, dependent):
            self.found.add(value)
            adds = facts_of(equation.primitive).adds or equation.name == "sub"
            if not self.shifted.isdisjoint(operands) or (adds and len(operands) < len(equation.inputs)):
                self.shifted.add(value)

    def pass_on(self, same: object, value: Value) -> None:
        """Note a value that is the same as another one."""
        if same in self.found:
            self.found.add(value)
        if same in self.shifted:
            self.shifted.add(value)


def _is_linear(equation: Equation, dependent: set[Value]) -> bool:
    """Return whether a result is linear in its operands that are sums."""
    rule, depends = facts_of(equation.primitive).linear, [a in dependent for a in equation.inputs]
    if rule is None:
        return equation.name == "select_n" and not depends[0] and all(depends[1:])
    if rule.operands is Operands.EITHER:
        return sum(depends) == 1
    return rule.operands is Operands.EVERY or (depends[0] and not any(depends[1:]))


def _moves_examples(equation: Equation, dims: Mapping[Value, BatchDim]) -> bool:
    """Return whether a result may have another example in the place of one."""
    first = equation.inputs[0]
    dim = dims[first][0] if isinstance(first, Value) and first in dims else None
    if dim is None:
        return False
    if equation.name == "pad":
        return any(equation.params["padding_config"][dim])
    return equation.name == "gather" and dim in equation.params["dimension_numbers"].collapsed_slice_dims
