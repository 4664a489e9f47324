"""How many examples a value adds up, from a single trace: some losses can be traced for one size of a batch alone.

A value of one example, and a mean, count one example; a sum counts all that it adds. A division by a number that is a
multiple of the examples of a sum makes it a mean: a loss may divide by the size of the microbatch and by other numbers
at once. So a sum may pass for a mean, where its divisor happens to fit, but no mean passes for a sum.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.analyses.batch_dimensions import ways_of
from jaxpp_flax.engine.tracing.ir import Equation, Value

__all__ = ["ROUND", "Count", "Rows", "counts_of", "divided_by", "number_of", "number_of_literal", "selected"]

Rows = tuple[int, ...]
"""Some examples of the batch, in the order in which a value holds them."""
ROUND = -1
"""The example that a round of a loop takes."""
_TOLERANCE = 1e-3  # of divisors: `n + 1e-6`
# No loss adds up so many. A deep model multiplies the widths of its layers, a mask may be as large as its type allows.
_LARGEST = 2.0**40


@dataclass(frozen=True)
class Count:
    """How many examples a value adds up; below 1, it has been divided before it was added up."""

    examples: float = 1.0
    entries: float = 1.0  # of one example: added, and not yet divided by their number
    rows: Rows | None = None  # it is made of these examples alone; None: of all, or not known
    ahead: float = 1.0  # the product of the numbers that it was divided by before it was summed
    averaged: bool = False  # it was divided by the number of examples that it adds
    statistics: frozenset[Value] = frozenset()  # the values over all examples, such as sums, that it is made of
    place: str | None = None  # the last place where it was summed over the examples

    def bounded(self) -> Count:
        """Return the count without numbers that are no counts any more."""
        kept = {name: getattr(self, name) for name in ("examples", "entries", "ahead")}
        lost = {name: 1.0 for name, number in kept.items() if not is_countable(number)}
        return replace(self, **lost) if lost else self


def is_countable(number: float) -> bool:
    """Return whether a number may be how many, or its reciprocal."""
    return 1 / _LARGEST <= number <= _LARGEST


def number_of_literal(value: Any) -> float | None:
    """Return the number that a literal, or each entry of a small array of NumPy, is."""
    try:
        if np.ndim(value) and not (isinstance(value, np.ndarray) and 0 < value.size < 5000):
            return None
        array = np.asarray(value)
        array = array.astype(np.float64 if not np.iscomplexobj(array) else np.complex128)
    except (TypeError, ValueError, RuntimeError):  # keys, arrays of several processes
        return None
    return float(array.flat[0]) if array.dtype == np.float64 and (array == array.flat[0]).all() else None


_SAME_NUMBER = frozenset(
    ["broadcast_in_dim", "convert_element_type", "copy", "reshape", "slice", "squeeze", "stop_gradient", "transpose"]
)
_ARITHMETIC = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "lt": operator.lt, "max": max, "min": min,
    "div": lambda a, b: a / b if b else None, "neg": operator.neg, "sqrt": lambda a: math.sqrt(abs(a)),
}  # fmt: skip


def number_of(name: str, numbers: Sequence[float | None]) -> float | None:
    """Return what an operation makes of numbers, such as the reciprocal of a size; None if it is not known."""
    if name == "select_n" and numbers[0] is not None:
        chosen = 1 + int(numbers[0])
        return numbers[chosen] if 0 < chosen < len(numbers) else None
    if not numbers or any(number is None for number in numbers):
        return None
    if name in _SAME_NUMBER:
        return numbers[0]
    return _ARITHMETIC[name](*numbers) if name in _ARITHMETIC else None


# ------------------------------------------------------------------ which examples


def selected(
    equation: Equation, numbers: Sequence[float | None], dim: int, rows: Rows
) -> Sequence[tuple[Rows | None, int | None]] | None:
    """Return for each result which examples it holds, and on which dimension; None if nothing is chosen among them.

    Args:
      equation: its first operand holds examples.
      numbers: the operands that are numbers.
      dim: the dimension of the examples.
      rows: the examples of the operand, in order.
    """
    params, shape = equation.params, equation.inputs[0].aval.shape
    if equation.name == "slice":
        if shape[dim] == equation.outputs[0].aval.shape[dim]:
            return None
        stride = 1 if params["strides"] is None else params["strides"][dim]
        taken = [slice(params["start_indices"][dim], params["limit_indices"][dim], stride)]
    elif equation.name == "split" and params["axis"] == dim:
        taken = [slice(*pair) for pair in itertools.pairwise(itertools.accumulate(params["sizes"], initial=0))]
    elif equation.name == "unstack" and params["axis"] == dim:
        return [((row,), None) for row in rows] if len(rows) == shape[dim] else [(None, None)] * shape[dim]
    elif equation.name == "dynamic_slice" and params["slice_sizes"][dim] != shape[dim]:
        start, size = numbers[1 + dim], params["slice_sizes"][dim]
        if start is None:
            return [((ROUND,) if size == 1 else None, None)]
        taken = [slice(int(start), int(start) + size)]
    elif equation.name == "gather" and dim in params["dimension_numbers"].collapsed_slice_dims:
        return _gathered(equation, numbers, rows)
    else:
        return None
    if len(rows) != shape[dim]:
        return [(None, None)] * len(taken)
    return [(rows[part], dim if len(rows[part]) > 1 else None) for part in taken]


def _gathered(
    equation: Equation, numbers: Sequence[float | None], rows: Rows
) -> list[tuple[Rows | None, int | None]] | None:
    """Return what indices that are no examples themselves choose."""
    out = equation.outputs[0].aval
    places = [d for d in range(out.ndim) if d not in equation.params["dimension_numbers"].offset_dims]
    if not places:
        index = numbers[1]
        return [((ROUND,) if index is None else rows[int(index) :][:1], None)]
    return [(None, places[0])] if len(places) == 1 and out.shape[places[0]] > 1 else None


# ------------------------------------------------------------------ how many


_ALIKE = frozenset(["abs", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "copy_p"]).union(
    ["dynamic_slice", "dynamic_update_slice", "gather", "imag", "max", "min", "name", "neg", "pad", "psum", "real"],
    ["psum_invariant", "reduce_max", "reduce_min", "reduce_precision", "reshape", "reshard", "rev", "scatter"],
    ["select_n", "sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient", "transpose", "unstack"],
)


def counts_of(
    equation: Equation,
    operands: Sequence[Count | None],
    numbers: Sequence[float | None],
    dims: Mapping[int, tuple[int, int]],
    size: int,
    place: str,
) -> Count:
    """Return how many examples the results of an equation without a body add up.

    Args:
      equation: some of its operands depend on the examples.
      operands: the counts of these; None for the others.
      numbers: the operands that are numbers.
      dims: the dimension of the operands, by position, that runs over examples, and how many these are.
      size: the number of examples in the batch.
      place: where the equation stands.
    """
    given, name = [one for one in operands if one is not None], equation.name
    base = Count(rows=_union(given), statistics=frozenset[Value]().union(*(one.statistics for one in given)))
    if not equation.outputs or not jnp.issubdtype(equation.outputs[0].aval.dtype, jnp.number):
        return base  # of a call of the host, too, which has no result
    if name in ("add", "add_any", "sub"):
        return _added(given, base, in_place=bool(dims))
    if name in ("mul", "div"):
        return _product(name, operands, numbers, base, size)
    if name in ("reduce_sum", "dot_general"):
        return _summed(equation, _product(name, operands, numbers, base, size), dims, size, place)
    if name == "cumsum" and dims.get(0, (None,))[0] == equation.params["axis"]:
        return replace(_alike(given, base), examples=given[0].examples * dims[0][1], place=place)
    if name in ("scatter-add", "scatter_add"):
        target, updates = operands[0], operands[2]
        if updates is not None and 2 in dims and (ways_of(equation, None)[2][dims[2][0]] or 0) < 0:
            updates = replace(updates, examples=updates.examples * min(dims[2][1], size), place=place)
        return _alike([one for one in (target, updates) if one is not None], base)
    if name in _ALIKE:
        first = name in ("gather", "dynamic_slice")
        return base if first and operands[0] is None else _alike(given[: 1 if first else None], base)
    return base


def _union(given: Sequence[Count]) -> Rows | None:
    """Return the examples that some values are made of together."""
    parts = [one.rows for one in given]
    return None if None in parts else tuple(sorted({row for part in parts for row in part}))  # type: ignore[union-attr]


def _alike(given: Sequence[Count], base: Count) -> Count:
    """Return the count of a value of which each entry is one of the given ones, or a sum of them."""
    if not given:
        return base
    most = max(given, key=lambda one: one.examples)
    entries, ahead = (max(of) for of in zip(*((one.entries, one.ahead) for one in given), strict=True))
    averaged = all(one.averaged for one in given)
    return replace(base, examples=most.examples, entries=entries, ahead=ahead, averaged=averaged, place=most.place)


def _added(given: Sequence[Count], base: Count, *, in_place: bool) -> Count:
    """Return the count of a sum of values; `in_place`: they hold examples, of which each is added to one other."""
    together = _alike(given, base)
    apart = base.rows is not None and len(base.rows) == sum(len(one.rows or ()) for one in given)
    if not apart or in_place or len(given) < 2:
        return together
    examples = sum(one.examples for one in given)
    place = together.place or "a sum of the values of single examples"
    return replace(together, examples=examples, place=place, averaged=math.isclose(examples, 1))


def _product(
    name: str, operands: Sequence[Count | None], numbers: Sequence[float | None], base: Count, size: int
) -> Count:
    """Return the count of a product or a quotient of two operands, or of the first one alone."""
    first, second = operands[0], operands[1] if len(operands) > 1 else None
    if first is not None and second is not None:
        of = operator.truediv if name == "div" else operator.mul
        place = next((one.place for one in (first, second) if one.examples != 1), None)
        return replace(
            base, examples=of(first.examples, second.examples), entries=of(first.entries, second.entries),
            ahead=of(first.ahead, second.ahead), place=place,
            averaged=name != "div" and (first.averaged or second.averaged),
        )  # fmt: skip
    if first is None and name == "div":
        return replace(base, examples=1 / second.examples, entries=1 / second.entries)  # type: ignore[union-attr]
    count, number = (first, numbers[1:2]) if first is not None else (second, numbers[:1])
    count = replace(_alike([count], base), averaged=count.averaged)  # type: ignore[list-item, union-attr]
    if not number or not number[0]:
        return count
    return divided_by(count, abs(number[0] if name == "div" else 1 / number[0]), size)


def divided_by(count: Count, by: float, size: int) -> Count:
    """Return the count of a value that is divided by a number."""
    if not is_countable(by):
        return count
    if by < 1:
        times = round(1 / by)
        return replace(count, averaged=count.averaged and bool(times % size))  # the size times a mean is a count
    whole = round(by)
    if whole < 2 or abs(by - whole) > _TOLERANCE * whole:
        return count
    if count.examples > 1.5:
        shared = math.gcd(whole, round(count.examples))
        examples, entries = count.examples / shared, math.gcd(whole // shared, max(round(count.entries), 1))
        averaged = count.averaged or (shared > 1 and examples < 1.5)
        return replace(count, examples=examples, entries=count.entries / entries, averaged=averaged)
    entries = math.gcd(whole, max(round(count.entries), 1))
    left = whole // entries
    examples, ahead = (count.examples / size, 1) if left == size else (count.examples, left)
    return replace(count, examples=examples, entries=count.entries / entries, ahead=count.ahead * ahead)


def _summed(equation: Equation, count: Count, dims: Mapping[int, tuple[int, int]], size: int, place: str) -> Count:
    """Return the count of a sum over dimensions."""
    inputs = equation.inputs
    if equation.name == "reduce_sum":
        over = {0: tuple(equation.params["axes"])}
    else:
        over = dict(enumerate(equation.params["dimension_numbers"][0]))
    total = math.prod(inputs[0].aval.shape[d] for d in over[0])
    held = [number for i, (dim, number) in dims.items() if dim in over[i]]
    if held:
        examples = min(held[0], size)  # several views of an example are entries of it
    else:  # all entries, wherever the examples are
        is_one = not dims and count.rows is None and equation.outputs[0].aval.ndim == 0
        is_all = is_one and not count.statistics and count.examples < 1.5
        examples = size if is_all and total and total % size == 0 else 1
    made = replace(count, examples=count.examples * examples, entries=count.entries * total / examples)
    if examples == 1:
        return made
    if count.ahead > 1 and math.isclose(made.examples * made.entries, count.ahead):  # each entry of the mean was
        made = replace(made, examples=1.0, entries=1.0, ahead=1.0)
    return replace(made, place=place, averaged=made.examples < 1.5)
