"""Find where a function of a batch joins its examples, so that it is no mean or sum over them.

A step takes the mean, or the sum, of its loss over the microbatches. This is the loss of the whole batch only if the
loss is linear in sums over the examples. `batch_dimensions` says which dimension of a value runs over the examples, and
the table of primitives which operations a sum passes. The first other operation on a sum over the examples joins them:
sqrt of a mean, the product of two means, softmax over the batch. So does an operation that reads two examples at once,
such as `z @ z.T`.

What the search cannot follow (some gathers, loops, complex sums, comparisons and indices that are made of sums) counts
as joining nothing. So it names no mean over examples, and it may miss a function that is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ways_of
from jaxpp_flax.engine.analyses.batch_flow import propagate
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, applied, values
from jaxpp_flax.engine.tracing.primitives import Batch, Cost, Operands, facts_of

__all__ = ["Joins", "find_joins", "follow_examples"]


@dataclass(frozen=True)
class Joins:
    """How a value joins the examples of its batch; places are texts, such as "`div` at loss.py:12 (loss_fn)"."""

    summed: bool = False  # it is linear in sums over the examples
    divided: str | None = None  # it is linear in such sums, but for this division by one
    mixed: str | None = None  # another operation joins examples


_NONE = Joins()


def find_joins(graph: Graph, examples: Iterable[Value], count: int) -> list[Joins]:
    """Return how each output of a graph joins the examples.

    Args:
      graph: the function.
      examples: the inputs whose first dimension runs over the examples; all other inputs are constants.
      count: the number of examples. Of a single example, the search knows no dimension that runs over the examples: any
        dimension of size 1 might be the one.
    """
    return follow_examples(graph, examples, count)[0]


def follow_examples(graph: Graph, examples: Iterable[Value], count: int) -> tuple[list[Joins], list[int | None]]:
    """Return what `find_joins` does, and the dimension of each output that runs over the examples, as far as known."""
    search = _Search(examples, count)
    search.walk(graph.equations, "an unknown place")
    outputs = [atom if isinstance(atom, Value) else None for atom in graph.outputs]
    dims = [search.dims[value][0] if value in search.dims else None for value in outputs]
    return [_NONE if value is None else search.joins.get(value, _NONE) for value in outputs], dims


class _Search:
    def __init__(self, examples: Iterable[Value], count: int) -> None:
        self.dependent = set(examples)  # the values that depend on the examples
        # The examples are like shards of one example each. The name of the axis that shards them is their number.
        self.dims: dict[Value, BatchDim] = {value: (0, str(count)) for value in self.dependent if count > 1}
        self.joins: dict[Value, Joins] = {}

    def walk(self, equations: Sequence[Equation], place: str) -> None:
        """Follow the examples through equations; `place` is that of the call around them."""
        for equation in equations:
            if self.dependent.isdisjoint(values(equation.inputs)):
                continue
            where = place if equation.where == "unknown" else equation.where
            facts = facts_of(equation.primitive)
            if (called := facts.body_in(equation.params)) is not None:
                body = applied(called, equation.inputs)
                self.walk(body.equations, where)
                self._pass_on(zip(body.outputs, equation.outputs, strict=True))
            elif facts.batch is Batch.EACH:
                self._pass_on(zip(equation.inputs, equation.outputs, strict=True))
            elif equation.name == "cond":
                self._enter_branches(equation, where)
            else:
                self._compute(equation, f"`{equation.name}` at {where}")

    def _pass_on(self, pairs: Iterable[tuple[object, Value]]) -> None:
        for same, value in pairs:
            if same in self.dependent:
                self.dependent.add(value)
            if same in self.dims:
                self.dims[value] = self.dims[same]  # type: ignore[index]
            if same in self.joins:
                self.joins[value] = self.joins[same]  # type: ignore[index]

    def _enter_branches(self, equation: Equation, place: str) -> None:
        """Follow the examples through each branch of a condition: a result joins what it joins in any of them."""
        branches = [applied(branch, equation.inputs[1:]) for branch in equation.params["branches"]]
        for branch in branches:
            self.walk(branch.equations, place)
        for k, value in enumerate(equation.outputs):
            self.dependent.add(value)
            made = values(branch.outputs[k] for branch in branches)
            dims = {self.dims.get(result) for result in made if result in self.dependent}
            if len(dims) == 1 and (dim := dims.pop()) is not None:
                self.dims[value] = dim
            joins = _together([self.joins.get(result, _NONE) for result in made])
            if joins != _NONE:
                self.joins[value] = joins

    def _compute(self, equation: Equation, place: str) -> None:
        known = {v: self.dims[v] for v in values(equation.inputs) if v in self.dims}
        at = {i: known[a][0] for i, a in enumerate(equation.inputs) if isinstance(a, Value) and a in known}
        found = _concatenated(equation, known) or propagate([equation], known, int)
        for value in equation.outputs:
            self.dependent.add(value)
            if value in found:
                self.dims[value] = found[value]
            joins = self._joins(equation, at, value, place)
            if joins != _NONE:
                self.joins[value] = joins

    def _joins(self, equation: Equation, at: Mapping[int, int], value: Value, place: str) -> Joins:
        operands = [self.joins.get(a, _NONE) if isinstance(a, Value) else _NONE for a in equation.inputs]
        joins = _together(operands)
        dtype = value.aval.dtype
        inexact = jnp.issubdtype(dtype, jnp.inexact)
        if _reads_two_examples(equation, at) or (inexact and _selects_or_scans(equation, at)):
            return Joins(mixed=joins.mixed or joins.divided or place)
        if equation.name == "div" and operands[1] != _NONE and 1 not in at:
            return replace(operands[0], divided=place)
        if joins != _NONE and not self._is_linear(equation, at, operands):
            joined = joins.divided or (place if joins.summed else None)
            whole = jnp.issubdtype(dtype, jnp.integer)  # a count stays one under `maximum(count, 1)`
            return Joins(mixed=joins.mixed or (joined if inexact else None), summed=joins.summed and whole)
        facts = facts_of(equation.primitive)
        if facts.linear is None and facts.batch is not Batch.ELEMENTWISE:
            joins = replace(joins, summed=False)
        if _sums_examples(equation, at) or _makes_one_number(equation, value):
            joins = replace(joins, summed=True)
        return joins

    def _is_linear(self, equation: Equation, at: Mapping[int, int], operands: Sequence[Joins]) -> bool:
        """Return whether an equation is linear in operands that are sums over the examples, as far as is known."""
        if equation.name == "select_n":
            return 0 not in at
        if any(jnp.issubdtype(atom.aval.dtype, jnp.complexfloating) for atom in equation.inputs):
            return True  # the table does not tell a real part, which is linear, from a modulus
        facts = facts_of(equation.primitive)
        rule = facts.linear
        if rule is None:
            return facts.batch is not Batch.ELEMENTWISE
        depends = [isinstance(a, Value) and a in self.dependent for a in equation.inputs]
        if rule.operands is Operands.EITHER:  # a product with a divisor's inverse is the quotient
            return not all(depends) or any(o.divided for o in operands)
        return rule.operands is not Operands.FIRST or not any(depends[1:])


def _together(operands: Sequence[Joins]) -> Joins:
    """Return the joins of a linear function of operands."""
    return Joins(
        any(o.summed for o in operands),
        next((o.divided for o in operands if o.divided), None),
        next((o.mixed for o in operands if o.mixed), None),
    )


def _concatenated(equation: Equation, known: Mapping[Value, BatchDim]) -> dict[Value, BatchDim] | None:
    """Return the dimension of several batches that are concatenated: it runs over the examples of all of them."""
    if equation.name != "concatenate":
        return None
    dim = equation.params["dimension"]
    if any(a not in known or known[a][0] != dim for a in equation.inputs):  # type: ignore[index]
        return None
    (value,) = equation.outputs
    return {value: (dim, str(value.aval.shape[dim]))}


def _targets(equation: Equation, at: Mapping[int, int]) -> set[int | None]:
    """Return where the dimensions of the examples go; see `ways_of`."""
    ways = ways_of(equation, None)
    return {ways[i][dim] if i < len(ways) else None for i, dim in at.items()}


def _reads_two_examples(equation: Equation, at: Mapping[int, int]) -> bool:
    """Return whether each entry of the result reads two examples: of two operands that hold them on two dimensions."""
    pairs = facts_of(equation.primitive).batch in (Batch.DOT, Batch.ELEMENTWISE)
    return pairs and len(_targets(equation, at)) > 1


def _sums_examples(equation: Equation, at: Mapping[int, int]) -> bool:
    contracts = facts_of(equation.primitive).batch in (Batch.DOT, Batch.REDUCED)
    return contracts and any(target is not None and target < 0 for target in _targets(equation, at))


def _makes_one_number(equation: Equation, value: Value) -> bool:
    """Return whether a number is made of arrays: of all examples, wherever these stand in the arrays."""
    if value.aval.ndim or all(atom.aval.ndim == 0 for atom in equation.inputs):
        return False
    adds_up = equation.name == "scan" and jnp.issubdtype(value.aval.dtype, jnp.inexact)
    return adds_up or equation.name in ("reduce_sum", "dot_general")


def _selects_or_scans(equation: Equation, at: Mapping[int, int]) -> bool:
    """Return whether an equation orders the examples, selects among them, or goes through them one after another."""
    facts = facts_of(equation.primitive)
    dim = at.get(0)
    if facts.is_reduction:
        return equation.name != "reduce_sum" and dim in equation.params["axes"]
    # The others of this kind, such as `split`, only move whole examples.
    orders = facts.batch is Batch.ALONG and facts.cost is not Cost.LIGHT
    return orders and dim is not None and dim in facts.dimensions_in(equation.params)
