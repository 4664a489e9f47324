"""Find where a function of a batch joins its examples, so that it is no mean or sum over them.

A step takes the mean, or the sum, of its loss over the microbatches. This is the loss of the whole batch only if the
loss is linear in sums over the examples. `batch_dimensions` says which dimension of a value runs over the examples, and
the table of primitives which operations a sum passes. The first other operation on a sum over the examples joins them:
sqrt of a mean, the product of two means, softmax over the batch. So does an operation that reads two examples at once,
such as `z @ z.T`.

The same search counts how many examples each value adds up (see `example_counts.py`), and finds the statistics of the
batch by which examples are normalised, as BatchNorm does.

What the search cannot follow (some gathers, loops, complex sums, comparisons and indices that are made of sums) counts
as joining nothing. So it names no mean over examples, and it may miss a function that is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ways_of
from jaxpp_flax.engine.analyses.batch_flow import propagate
from jaxpp_flax.engine.analyses.inner_bodies import open_scan
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, applied, values
from jaxpp_flax.engine.tracing.primitives import Batch, Cost, Operands, facts_of
from jaxpp_flax.trainers.loss.apart import Apart
from jaxpp_flax.trainers.loss.example_counts import (
    ROUND,
    Count,
    counts_of,
    number_of,
    number_of_literal,
    selected,
)

__all__ = ["Followed", "Joins", "follow_examples"]


@dataclass(frozen=True)
class Joins:
    """How a value joins the examples of its batch; places are texts, such as "`div` at loss.py:12 (loss_fn)"."""

    summed: bool = False  # it is linear in sums over the examples
    divided: str | None = None  # it is linear in such sums, but for this division by one
    mixed: str | None = None  # another operation joins examples


_NONE = Joins()


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What becomes of the examples of a batch: for each output of a function how it joins them, and so on.

    Args:
      joins: how it joins the examples.
      dims: its dimension that runs over the examples, as far as known.
      counts: how many examples it adds up; None if it does not depend on them.
      numbers: the number that it is, if it is a known one.
      normalises: whether it is made of statistics of the batch that the examples of this batch are computed with.
      apart: whether it depends on no example, or holds examples apart: see `Apart`.
      shifted: whether it is a sum over the examples and something else.
    """

    joins: Sequence[Joins]
    dims: Sequence[int | None]
    counts: Sequence[Count | None]
    numbers: Sequence[float | None]
    normalises: Sequence[bool]
    apart: Sequence[bool]
    shifted: Sequence[bool]


def follow_examples(
    graph: Graph, examples: Iterable[Value], count: int, constants: Mapping[Value, Any] | None = None
) -> Followed:
    """Follow the examples of a batch through a function of it.

    Args:
      graph: the function.
      examples: the inputs whose first dimension runs over the examples; all other inputs are constants.
      count: the number of examples. Of a single example, the search knows no dimension that runs over the examples: any
        dimension of size 1 might be the one.
      constants: the values of the inputs that are known.
    """
    search = _Search(count)
    search.numbers = {value: number_of_literal(known) for value, known in (constants or {}).items()}
    for value in examples:
        search.add(value, Count(), (0, str(count)) if count > 1 else None)
    search.walk(graph.equations, "an unknown place")
    outputs = [atom if isinstance(atom, Value) else None for atom in graph.outputs]
    counts = [search.counts.get(value) for value in outputs]  # type: ignore[arg-type]
    return Followed(
        joins=[search.joins.get(value, _NONE) for value in outputs],  # type: ignore[arg-type]
        dims=[search.dims[value][0] if value in search.dims else None for value in outputs],
        counts=counts,
        numbers=search.known(graph.outputs),
        normalises=[bool(found and found.statistics & search.normalising) for found in counts],
        apart=[value not in search.dependent or value in search.apart.found for value in outputs],
        shifted=[value in search.apart.shifted for value in outputs],
    )


class _Search:
    def __init__(self, count: int, normalising: set[Value] | None = None) -> None:
        self.count = count  # the number of examples
        self.dependent: set[Value] = set()  # the values that depend on the examples
        # The examples are like shards of one example each. The name of the axis that shards them is their number.
        self.dims: dict[Value, BatchDim] = {}
        self.joins: dict[Value, Joins] = {}
        self.counts: dict[Value, Count] = {}  # of each value that depends on the examples
        self.numbers: dict[Value, float | None] = {}  # the values of which each entry is the same known number
        self.normalising: set[Value] = set() if normalising is None else normalising  # statistics of the batch
        self.apart = Apart()

    def add(self, value: Value, count: Count, dim: BatchDim | None = None) -> None:
        """Note a value that depends on the examples."""
        self.dependent.add(value)
        self.counts[value] = count
        if dim is not None:
            self.dims[value] = dim
            self.apart.found.add(value)

    def walk(self, equations: Sequence[Equation], place: str) -> None:
        """Follow the examples through equations; `place` is that of the call around them."""
        for equation in equations:
            facts = facts_of(equation.primitive)
            called = facts.body_in(equation.params)
            where = place if equation.where == "unknown" else equation.where
            if self.dependent.isdisjoint(values(equation.inputs)):
                numbers = self.known(equation.inputs)
                if called is None:
                    number = number_of(equation.name, numbers)
                    self.numbers.update((value, number) for value in equation.outputs if number is not None)
                    continue
                if not numbers or None in numbers:
                    continue
            if called is not None:
                body = applied(called, equation.inputs)
                self.walk(body.equations, where)
                self._pass_on(zip(body.outputs, equation.outputs, strict=True))
            elif facts.batch is Batch.EACH:
                self._pass_on(zip(equation.inputs, equation.outputs, strict=True))
            elif equation.name == "cond":
                self._enter_branches(equation, where)
            else:
                self._compute(equation, f"`{equation.name}` at {where}")
                if facts.batch is Batch.SCAN:
                    self._enter_scan(equation, where)

    def known(self, atoms: Iterable[Atom]) -> list[float | None]:
        """Return the numbers that atoms are, as far as these are known."""
        return [self.numbers.get(atom) if isinstance(atom, Value) else number_of_literal(atom.value) for atom in atoms]

    def _pass_on(self, pairs: Iterable[tuple[object, Value]]) -> None:
        for same, value in pairs:
            if same in self.dependent:
                self.dependent.add(value)
            if isinstance(same, Constant):
                self.numbers[value] = number_of_literal(same.value)
            self.apart.pass_on(same, value)
            for known in (self.dims, self.joins, self.counts, self.numbers):
                if same in known:
                    known[value] = known[same]  # type: ignore[index]

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
            counts = [self.counts[result] for result in made if result in self.counts]
            statistics = frozenset[Value]().union(*(one.statistics for one in counts))
            most = max(counts, key=lambda one: one.examples, default=Count())
            self.counts[value] = replace(most, statistics=statistics)

    def _enter_scan(self, equation: Equation, place: str) -> None:
        """Count the examples that the results of a loop add up: those of a round, or those of all rounds."""
        scan = open_scan(equation)
        first = scan.num_consts + scan.num_carry
        inner = _Search(self.count, self.normalising)
        for k, (atom, value) in enumerate(zip(equation.inputs, scan.body.inputs, strict=True)):
            if isinstance(atom, Value) and atom in self.dependent:
                count, dim = self.counts[atom], self.dims.get(atom)
                if dim is not None and k >= first:
                    count = replace(count, rows=(ROUND,)) if dim[0] == 0 else count
                    dim = (dim[0] - 1, dim[1]) if dim[0] else None
                inner.add(value, count, dim)
            elif k < scan.num_consts:
                (inner.numbers[value],) = self.known([atom])
        inner.walk(scan.body.equations, place)
        rounds = equation.params["length"]
        carried = zip(scan.body.inputs[scan.num_consts :], scan.body.outputs[: scan.num_carry], strict=False)
        grows = any(made in inner.dependent and before not in inner.dependent for before, made in carried)
        for k, (made, value) in enumerate(zip(scan.body.outputs, equation.outputs, strict=True)):
            if grows or (made in inner.dependent and made not in inner.apart.found):
                self.apart.found.discard(value)
            count = inner.counts.get(made)  # type: ignore[arg-type]
            if count is None:
                continue
            if count.rows is not None and ROUND in count.rows:  # each round has an example of its own
                count = replace(count, rows=None)
                if k >= scan.num_carry and rounds > 1:
                    self.dims[value] = (0, str(rounds))
                elif k < scan.num_carry and _adds_to(scan.body, made, scan.carry_in[k]):
                    examples = count.examples * rounds
                    text = f"`scan` at {place}"
                    count = replace(count, examples=examples, place=text, averaged=examples < 1.5)
            self.counts[value] = count

    def _compute(self, equation: Equation, place: str) -> None:
        known = {v: self.dims[v] for v in values(equation.inputs) if v in self.dims}
        at = {i: known[a][0] for i, a in enumerate(equation.inputs) if isinstance(a, Value) and a in known}
        found = _concatenated(equation, known) or propagate([equation], known, int)
        numbers = self.known(equation.inputs)
        operands = [self.counts.get(a) if isinstance(a, Value) else None for a in equation.inputs]
        held = {i: (dim, int(known[equation.inputs[i]][1])) for i, dim in at.items()}  # type: ignore[index]
        count = counts_of(equation, operands, numbers, held, self.count, place).bounded()
        chosen = self._chosen(equation, operands, numbers, held)
        for k, value in enumerate(equation.outputs):
            self.dependent.add(value)
            rows, dim = chosen[k] if chosen else (count.rows, found.get(value))
            one = count if rows == count.rows else replace(count, rows=rows)
            if dim is not None:
                self.dims[value] = dim
            joins = self._joins(equation, at, value, place, is_one=count.rows is not None and len(count.rows) == 1)
            if joins != _NONE:
                self.joins[value] = joins
            if not chosen:
                targets = _targets(equation, at)
                self.apart.note(equation, value, self.dependent, self.dims, targets, self.count)
            self.counts[value] = self._with_statistics(equation, one, operands, at, value)

    def _chosen(
        self, equation: Equation, operands: Sequence[Count | None], numbers: Any, held: Mapping[int, tuple[int, int]]
    ) -> list[tuple[tuple[int, ...] | None, BatchDim | None]] | None:
        """Return for each result which examples it holds, and on which dimension, if it holds other ones."""
        if (count := operands[0]) is not None and 0 in held and not any(operands[1:]):
            rows = count.rows or tuple(range(held[0][1]))
            taken = selected(equation, numbers, held[0][0], rows) or ()
        elif equation.name in ("concatenate", "stack") and not held and all(one and one.rows for one in operands):
            rows = tuple(row for one in operands for row in one.rows)  # type: ignore[union-attr]
            axis = equation.params["dimension" if equation.name == "concatenate" else "axis"]
            is_one = len(rows) == len({*rows}) == equation.outputs[0].aval.shape[axis]
            taken = [(rows, axis)] if is_one and len(rows) > 1 else ()
        else:
            return None
        made = []
        for value, (rows, dim) in zip(equation.outputs, taken, strict=False):
            made.append((rows, None if dim is None else (dim, str(value.aval.shape[dim]))))
        return made or None

    def _with_statistics(
        self, equation: Equation, count: Count, operands: Sequence[Count | None], at: Mapping[int, int], value: Value
    ) -> Count:
        """Return the count with the statistics of the batch; note those that examples are computed with.

        What belongs to an example is no statistic, whatever it is computed with.
        """
        facts = facts_of(equation.primitive)
        of_examples = value in self.dims
        for i, operand in enumerate(operands):
            if operand is not None and operand.statistics and i not in at:
                others = [one for k, one in enumerate(operands) if one is not None and k != i]
                is_table = value.aval.ndim > 1 and any(one.statistics != operand.statistics for one in others)
                if of_examples or is_table:
                    self.normalising |= operand.statistics
                    of_examples = True
        statistics = frozenset[Value]() if of_examples else count.statistics
        if equation.name in ("while", "shard_map"):  # not entered: it may do anything
            self.normalising.add(value)
        elif not _sums_examples(equation, at) and not (facts.is_reduction and at.get(0, 0) in equation.params["axes"]):
            return count if statistics == count.statistics else replace(count, statistics=statistics)
        return replace(count, statistics=statistics | {value})

    def _joins(self, equation: Equation, at: Mapping[int, int], value: Value, place: str, *, is_one: bool) -> Joins:
        """Return how a result joins the examples; `is_one`: it is made of a single one."""
        if is_one:
            return _NONE
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


def _adds_to(graph: Graph, atom: Atom, carry: Value) -> bool:
    """Return whether a value is the carry plus other values."""
    while isinstance(atom, Value) and atom is not carry:
        made = graph.producer.get(atom)
        if made is not None and made.name in ("add", "add_any"):
            return any(_adds_to(graph, term, carry) for term in made.inputs)
        if made is None or made.name != "convert_element_type":
            return False
        atom = made.inputs[0]
    return atom is carry


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
