"""Go through a function that was traced for two sizes of a batch, and find how each result grows (see `growth.py`).

Both traces have the same equations as a rule. Where they differ, as in a Python loop over the examples, nothing is
known of growth; what a value depends on is known all the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from jaxpp_flax.engine.analyses.inner_bodies import open_scan
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, applied, opened
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of
from jaxpp_flax.trainers.loss.growth import (
    Growth,
    added,
    alike,
    constant_of,
    either,
    grows,
    read,
    results_of,
    scaled,
)

__all__ = ["compare_growth"]


class _TracesDiffer(Exception):  # noqa: N818 (no error of users)
    """Two traces of one function have different equations."""


@dataclass(frozen=True)
class Compared:
    """What two traces of a function tell.

    Args:
      outputs: the growth of each output.
      is_known: whether the traces could be compared; if not, only `reads` and `onto` are known.
      selects: whether they take as many examples out of more, as `x[:4]` does: the factor is that of these alone.
    """

    outputs: list[Growth]
    is_known: bool
    selects: bool = False


def compare_growth(small: Graph, large: Graph | None, inputs: Sequence[Growth]) -> Compared:
    """Return how the outputs of a function grow.

    Args:
      small: the function for a batch.
      large: the function for twice as many examples; None if there is no such trace.
      inputs: the growths of the inputs.
    """
    if large is not None:
        walk = _Walk()
        try:
            return Compared(walk.graph(small, large, inputs), True, walk.selects)
        except _TracesDiffer:
            pass
    return Compared(_Walk().graph(small, small, inputs), False)


_SELECTING = ("dynamic_slice", "gather", "slice", "split", "unstack")


class _Walk:
    def __init__(self) -> None:
        self.known: dict[Value, Growth] = {}
        self.selects = False

    def graph(self, small: Graph, large: Graph, inputs: Sequence[Growth]) -> list[Growth]:
        """Return the growths of the outputs of a graph, from those of its inputs."""
        self.known.update(zip(small.inputs, inputs, strict=True))
        return self._outputs(small, large)

    def _outputs(self, small: Graph, large: Graph) -> list[Growth]:
        if len(small.equations) != len(large.equations) or len(small.outputs) != len(large.outputs):
            raise _TracesDiffer
        for one, other in zip(small.equations, large.equations, strict=True):
            same = one.name == other.name and len(one.inputs) == len(other.inputs)
            if not same or len(one.outputs) != len(other.outputs):
                raise _TracesDiffer
            self.known.update(zip(one.outputs, self._results(one, other), strict=True))
        return self._of(small.outputs, large.outputs)

    def _of(self, small: Sequence[Atom], large: Sequence[Atom]) -> list[Growth]:
        return [self._of_atom(*pair) for pair in zip(small, large, strict=True)]

    def _of_atom(self, small: Atom, large: Atom) -> Growth:
        if isinstance(small, Value):
            return self.known[small]
        found = constant_of(small, large)
        if found is None:
            raise _TracesDiffer
        return found

    def _results(self, small: Equation, large: Equation) -> list[Growth]:
        operands = self._of(small.inputs, large.inputs)
        if not small.outputs:
            return []
        try:
            return self._entered(small, large, operands)
        except _TracesDiffer:
            if small is large:
                raise
            alone = self._entered(small, small, operands)
            return [replace(read(g), factor=None, uneven=False) for g in alone]

    def _entered(self, small: Equation, large: Equation, operands: list[Growth]) -> list[Growth]:
        """Return the growths of an equation's results, from those in its body if it has one."""
        facts = facts_of(small.primitive)
        if (called := facts.body_in(small.params)) is not None:
            other = facts.body_in(large.params)
            return self._outputs(applied(called, small.inputs), applied(other, large.inputs))
        if facts.batch is Batch.EACH:
            return operands
        if small.name == "cond":
            return self._conditions(small, large, operands)
        if facts.batch is Batch.SCAN:
            return self._scan(small, large, operands)
        if small.name == "while":
            return self._while(small, large, operands)
        if facts.batch is Batch.SHARD_MAP:
            return self.graph(body_of(small), body_of(large), operands)
        if small.name in _SELECTING and grows(small.inputs[0], large.inputs[0]):
            self.selects |= not grows(small.outputs[0], large.outputs[0])
        return results_of(small, large, operands)

    def _conditions(self, small: Equation, large: Equation, operands: list[Growth]) -> list[Growth]:
        made = []
        for one, other in zip(small.params["branches"], large.params["branches"], strict=True):
            made.append(self._outputs(applied(one, small.inputs[1:]), applied(other, large.inputs[1:])))
        reads = read(operands[0]).reads
        found = [alike(results) for results in zip(*made, strict=True)]
        return [replace(g, reads=g.reads | reads) for g in found]

    def _scan(self, small: Equation, large: Equation, operands: list[Growth]) -> list[Growth]:
        one, other = open_scan(small), open_scan(large)
        first, second = one.num_consts, one.num_consts + one.num_carry
        consts, init, slices = operands[:first], operands[first:second], operands[second:]
        longer = large.params["length"] / max(small.params["length"], 1)
        # A carry that is only added to: its name stands in the place of its value.
        names = [("carry", small, k) for k in range(len(init))]
        marks = [Growth(factor=0.0, onto=(name, "add")) for name in names]
        made = self.graph(one.body, other.body, [*consts, *marks, *slices])
        elsewhere = frozenset[Hashable]().union(*(g.reads for g in made))
        sums = [
            made[k].onto == (name, "add") and name not in elsewhere and not any(
                g.onto is not None and g.onto[0] == name for j, g in enumerate(made) if j != k
            )
            for k, name in enumerate(names)
        ]  # fmt: skip
        start = [mark if is_sum else given for mark, given, is_sum in zip(marks, init, sums, strict=True)]
        made = self._repeated(one.body, other.body, consts, start, slices)
        place = f"`scan` at {small.where}"
        found = [
            added([given, scaled(replace(after, onto=None), longer, place)], place) if is_sum else after
            for given, after, is_sum in zip(init, made, sums, strict=False)
        ]
        carries = frozenset(names)
        return [replace(g, reads=g.reads - carries) for g in [*found, *made[len(init) :]]]

    def _repeated(
        self, small: Graph, large: Graph, consts: list[Growth], start: list[Growth], slices: list[Growth]
    ) -> list[Growth]:
        """Return the outputs of a body once another round changes no carry."""
        carry = start
        for _ in range(len(start) + 8):
            made = self.graph(small, large, [*consts, *carry, *slices])
            after = [either(*pair) for pair in zip(carry, made, strict=False)]
            if after == carry:
                return [*carry, *made[len(carry) :]]
            carry = after
        reads = frozenset[Hashable]().union(*(read(g).reads for g in [*consts, *carry, *slices]))
        return [Growth(factor=None, reads=reads) for _ in made]

    def _while(self, small: Equation, large: Equation, operands: list[Growth]) -> list[Growth]:
        first = small.params["cond_nconsts"]
        second = first + small.params["body_nconsts"]
        (one, goes_on), (other, also) = map(_open_while, (small, large))
        made = self._repeated(one, other, operands[first:second], operands[second:], [])
        (test,) = self.graph(goes_on, also, [*operands[:first], *made])
        return [replace(g, reads=g.reads | test.reads) for g in made]


def _open_while(equation: Equation) -> tuple[Graph, Graph]:
    """Return the body of a `while` and its condition, with inputs of their own."""
    found = []
    for jaxpr in (equation.params["body_jaxpr"], equation.params["cond_jaxpr"]):
        inputs = tuple(Value(v.aval) for v in opened(jaxpr).invars)
        found.append(applied(jaxpr, inputs))
    return found[0], found[1]
