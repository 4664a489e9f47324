"""How values grow with the number of examples: the domain, and what one equation makes of its operands.

A function of a batch is traced for two sizes, the second twice the first. Dimensions and literals that differ between
the two depend on the number of examples: a sum over such a dimension is twice as large, a quotient by such a literal
half as large. So each value gets a factor: 1 for what belongs to one example and for a mean, 2 for a sum. Terms with
different factors, as in a mean plus a sum, make a value that grows unevenly.

Each value has the names of the inputs that it is computed from, too. `growth_walk.py` goes through calls and loops.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of

__all__ = ["EXAMPLES", "Growth", "added", "alike", "constant_of", "either", "is_same", "read", "results_of", "scaled"]

EXAMPLES = "examples"
"""The name of the inputs that hold the examples."""
_TINY = 1e-2  # a literal below this only keeps a divisor from being zero
_TOLERANCE = 1e-3  # of factors: `1 / (n + 1e-6)`


@dataclass(frozen=True)
class Growth:
    """How a value grows if the number of examples doubles; a factor of None is unknown, 0 is a value that is zero.

    `onto=(name, "add")`: the value is the input `name` plus a value with this factor; with "max" or "min" it is the
    larger or smaller of the two.
    """

    factor: float | None = 1.0
    literal: float | None = None  # about the size of a value that is made of literals alone
    place: str | None = None  # the last place where it was summed over the examples, or became uneven
    uneven: bool = False  # it has terms with different factors
    reads: frozenset[Hashable] = frozenset()  # the names of the inputs that it depends on
    onto: tuple[Hashable, str] | None = None  # the name of an input, and "add", "max" or "min"
    extreme: str | None = None  # "max" or "min": it is the largest or smallest value of all examples
    chosen: bool = False  # most entries may be zero: it has been multiplied by a mask, such as a one-hot code
    sums: bool = False  # it is linear in sums over the examples
    divided: str | None = None  # the place where it was divided by such a sum

    @property
    def is_zero(self) -> bool:
        return self.factor == 0 and self.onto is None


def read(growth: Growth) -> Growth:
    """Return the growth of a value as an operand that is not only added to: the input below it is read."""
    if growth.onto is None:
        return growth
    name, kind = growth.onto
    below = Growth(reads=growth.reads | {name})
    return below if growth.factor == 0 or kind != "add" else added([below, replace(growth, onto=None)], growth.place)


def is_same(first: float | None, second: float | None) -> bool:
    """Return whether two factors are known and equal."""
    return first is not None and second is not None and math.isclose(first, second, rel_tol=_TOLERANCE)


def scaled(growth: Growth, factor: float | None, place: str | None = None) -> Growth:
    """Return the growth of a sum over dimensions that have `factor` times as many entries."""
    if growth.factor == 0 or factor == 1:
        return growth
    product = None if growth.factor is None or factor is None else growth.factor * factor
    sums = growth.sums or (factor is not None and EXAMPLES in growth.reads)
    return replace(growth, factor=product, place=place or growth.place, sums=sums)


def added(terms: Sequence[Growth], place: str | None, *, inexact: bool = True) -> Growth:
    """Return the growth of a sum. One of the terms may be added onto an input."""
    onto = [term.onto for term in terms if term.onto is not None]
    if len(onto) > 1 or any(kind != "add" for _, kind in onto):
        return added([read(term) for term in terms], place, inexact=inexact)
    told = [t for t in terms if t.factor != 0 and not (t.literal is not None and abs(t.literal) < _TINY)]
    common = _common(terms)
    literals = [term.literal for term in terms]
    literal = None if None in literals else sum(map(abs, filter(None, literals)))
    made = replace(common, onto=onto[0] if onto else None, literal=literal)
    if not told:
        return replace(made, factor=0.0 if all(t.factor == 0 for t in terms) else 1.0)
    if common.uneven or any(term.factor is None for term in told):
        return replace(made, factor=None)
    if all(is_same(term.factor, told[0].factor) for term in told):
        return replace(made, factor=told[0].factor)
    return replace(made, factor=None, uneven=inexact, place=place if inexact else None)


def alike(operands: Sequence[Growth]) -> Growth:
    """Return the growth of a value of which each entry is one of the operands; literals only guard the others."""
    onto = {g.onto for g in operands if not g.is_zero and g.literal is None}
    if len(onto) != 1:
        if onto - {None}:
            return alike([read(g) for g in operands])
        onto = {None}
    told = [g for g in operands if g.factor != 0 and g.literal is None]
    told = told or [g for g in operands if g.factor != 0] or list(operands[:1])
    same = all(is_same(g.factor, told[0].factor) or g.factor == told[0].factor for g in told)
    literals = [g.literal for g in operands]
    return replace(
        _common(operands),
        factor=told[0].factor if same else None,
        onto=next(iter(onto)),
        literal=None if None in literals else max(map(abs, filter(None, literals)), default=0.0),
    )


def _common(operands: Iterable[Growth]) -> Growth:
    """Return what a result has of its operands, whatever the operation."""
    given = list(operands)
    first = [g.place for g in given if g.place and (g.uneven or not is_same(g.factor, 1))]
    return Growth(
        place=(first or [None])[0],
        uneven=any(g.uneven for g in given),
        reads=frozenset[Hashable]().union(*(g.reads for g in given)),
        chosen=any(g.chosen for g in given),
        sums=any(g.sums for g in given),
        divided=next((g.divided for g in given if g.divided), None),
    )


def either(before: Growth, after: Growth) -> Growth:
    """Return the growth of the carry of a loop that was the one, and is the other after a round."""
    if before == after or before.is_zero:
        return after
    if before.onto != after.onto:
        before, after = read(before), read(after)
    factors = {g.factor for g in (before, after)} - {0.0}
    same = len(factors) < 2 or is_same(before.factor, after.factor)
    return replace(
        _common([before, after]),
        factor=(before.factor or after.factor) if same else None,
        literal=None if after.literal is None else before.literal,
        onto=before.onto,
    )


def literal_growth(small: Any, large: Any) -> Growth:
    """Return the growth of a literal, or of an array that a function captures, from its values in both traces."""
    if small is large:
        size = _size_of(small) if np.ndim(small) == 0 else 1.0
        return Growth(factor=0.0 if size == 0 else 1.0, literal=1.0 if size is None else size)
    if np.ndim(small) and np.shape(small) == np.shape(large):
        return Growth(literal=1.0)
    sizes = _size_of(small), _size_of(large)
    if None in sizes:
        return Growth(literal=1.0)
    if not all(sizes):
        return Growth(factor=None if any(sizes) else 0.0, literal=sizes[0])
    factor = abs(sizes[1] / sizes[0])  # type: ignore[operator]
    if np.ndim(small) and math.isfinite(factor):  # other random numbers are not a growth
        power = round(math.log2(factor))
        factor = 2.0**power if abs(math.log2(factor) - power) < 0.25 else factor
    return Growth(factor=factor if math.isfinite(factor) else 1.0, literal=sizes[0])


def _size_of(value: Any) -> float | None:
    """Return a number, or the mean size of an array's entries; None where there is none."""
    try:
        array = np.asarray(value)
        array = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    except (TypeError, ValueError, RuntimeError):  # keys, arrays of several processes
        return None
    size = float(np.mean(np.abs(array)))
    return size if math.isfinite(size) else None


def grows(small: Atom, large: Atom) -> bool:
    """Return whether a dimension of a value depends on the number of examples."""
    return tuple(small.aval.shape) != tuple(large.aval.shape)


def _ratio(small: Atom, large: Atom, dims: Iterable[int]) -> float:
    """Return by how much more entries some dimensions of a value have."""
    return math.prod(large.aval.shape[d] / small.aval.shape[d] for d in dims if small.aval.shape[d])


# Primitives with the growth of their first operand. They may keep an input below if no entry is moved.
_KEPT = frozenset(
    [
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "name",
        "reduce_precision",
        "reshape",
        "reshard",
        "sharding_constraint",
        "squeeze",
        "stop_gradient",
    ]
)
_FIRST = _KEPT.union(
    ["abs", "dynamic_slice", "gather", "imag", "neg", "psum", "psum_invariant", "real", "reduce_max", "reduce_min"],
    ["rev", "slice", "split", "transpose"],
)
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3, "reciprocal": -1.0}


def results_of(small: Equation, large: Equation, operands: Sequence[Growth]) -> list[Growth]:
    """Return the growth of each result of an equation without a body, from its form in both traces."""
    name, place = small.name, f"`{small.name}` at {small.where}"
    if name == "sort":
        return [read(g) for g in operands]
    if name == "top_k":
        return [read(operands[0]), replace(_common(map(read, operands)), factor=1.0)]
    found = _result(name, small, large, operands, place)
    if jnp.issubdtype(small.outputs[0].aval.dtype, jnp.bool_):
        found = replace(read(found), factor=1.0, uneven=False, chosen=True)
    return [found] * len(small.outputs)


def _result(name: str, small: Equation, large: Equation, operands: Sequence[Growth], place: str) -> Growth:
    inexact = jnp.issubdtype(small.outputs[0].aval.dtype, jnp.inexact)
    if name in ("add", "add_any"):
        return added(operands, place, inexact=inexact)
    if name == "sub":
        return added([operands[0], read(operands[1])], place, inexact=inexact)
    if name in ("max", "min") and (merged := _merged(name, operands)) is not None:
        return merged
    if name in ("max", "min"):
        return alike(operands)
    if name == "select_n":
        made, masks = alike(operands[1:]), any(g.is_zero for g in operands[1:]) and operands[0].chosen
        return replace(made, reads=made.reads | read(operands[0]).reads, chosen=made.chosen or masks)
    if name in ("scatter-add", "scatter_add"):
        return _scattered(small, large, operands, place)
    if name in _FIRST:
        return _first(name, small, large, operands)
    return _of_read(name, small, large, [read(g) for g in operands], place)


def _of_read(name: str, small: Equation, large: Equation, operands: Sequence[Growth], place: str) -> Growth:
    """Return the result of an operation that keeps no input below."""
    if name == "mul":
        return _product(operands)
    if name == "div":
        divisor = operands[1].factor
        inverse = 1 / divisor if divisor else None
        quotient = replace(operands[1], factor=inverse if operands[1].factor != 0 else 1.0)
        made = _product([operands[0], quotient])
        return replace(made, divided=made.divided or place) if operands[1].sums else made
    if name == "reduce_sum":
        ratio = _ratio(small.inputs[0], large.inputs[0], small.params["axes"])
        return replace(scaled(operands[0], ratio, place), literal=None)
    if name == "dot_general":
        (dims, _), _ = small.params["dimension_numbers"]
        ratio = _ratio(small.inputs[0], large.inputs[0], dims)
        # A mask, such as a one-hot code, may choose a single example out of a sum for each entry; a number is the sum.
        unknown = ratio != 1 and small.outputs[0].aval.ndim > 0 and any(g.chosen for g in operands)
        return replace(scaled(_product(operands), None if unknown else ratio, place), literal=None)
    if name in _POWERS or name == "integer_pow":
        return _power(operands[0], _POWERS.get(name) or small.params["y"])
    if name == "clamp":
        return alike(operands)
    if name in ("concatenate", "pad", "dynamic_update_slice", "scatter"):
        return _placed(name, small, large, operands)
    if name.startswith("cum") and _ratio(small.inputs[0], large.inputs[0], [small.params["axis"]]) != 1:
        return _unknown(operands, is_one=False)
    return _other(small, large, operands)


def _placed(name: str, small: Equation, large: Equation, operands: Sequence[Growth]) -> Growth:
    """Return what is made of parts that are put side by side or into one another."""
    parts = {"pad": operands[:1], "dynamic_update_slice": operands[:2], "scatter": [operands[0], operands[-1]]}
    made = replace(alike(parts.get(name, operands)), reads=_common(operands).reads)
    pairs = [*zip(small.inputs, large.inputs, strict=True), (small.outputs[0], large.outputs[0])]
    ratios = [_ratio(s, x, range(s.aval.ndim)) for s, x in pairs]
    # Padded to one size, whatever the number of examples: sums over it tell nothing.
    return made if {*ratios} - {1.0} <= {ratios[-1]} else replace(made, factor=None)


def _first(name: str, small: Equation, large: Equation, operands: Sequence[Growth]) -> Growth:
    """Return the growth of the first operand; others, such as indices, are only read."""
    first, *others = operands
    size = small.outputs[0].aval.size
    if first.onto is not None and not (name in _KEPT and size == small.inputs[0].aval.size):
        first = read(first)
    made = replace(first, reads=first.reads.union(*(read(g).reads for g in others)))
    if name in ("reduce_max", "reduce_min"):
        over = _ratio(small.inputs[0], large.inputs[0], small.params["axes"]) != 1
        kind = name.removeprefix("reduce_")
        return replace(made, extreme=kind if (over or first.extreme == kind) else None)
    return made if name in _KEPT else replace(made, extreme=None)


def _merged(name: str, operands: Sequence[Growth]) -> Growth | None:
    """Return the largest of an input and of all examples: microbatches add to it one after another."""
    for below, other in (operands, operands[::-1]):
        untouched = below.onto is not None and (below.factor == 0 or below.onto[1] == name)
        if untouched and other.onto is None and other.extreme == name:
            onto = (below.onto[0], name)  # type: ignore[index]
            return Growth(reads=below.reads | other.reads, onto=onto)
    return None


def _scattered(small: Equation, large: Equation, operands: Sequence[Growth], place: str) -> Growth:
    """Return the growth of an array to which updates are added: each entry may get those of several examples."""
    target, updates = operands[0], read(operands[2])
    updates = replace(updates, reads=updates.reads | read(operands[1]).reads)
    if grows(small.outputs[0], large.outputs[0]):  # each example has places of its own
        return alike([read(target), updates])
    updates = scaled(updates, _ratio(small.inputs[2], large.inputs[2], range(small.inputs[2].aval.ndim)), place)
    return added([target, replace(updates, literal=None)], place)


def _product(operands: Sequence[Growth]) -> Growth:
    first, second = operands
    made = replace(_common(operands), factor=None)
    if first.factor == 0 or second.factor == 0:
        return replace(made, factor=0.0, uneven=False)
    if not made.uneven and first.factor is not None and second.factor is not None:
        made = replace(made, factor=first.factor * second.factor)
    if first.literal is not None and second.literal is not None:
        made = replace(made, literal=first.literal * second.literal)
    return made


def _power(operand: Growth, exponent: float) -> Growth:
    if operand.factor == 0 and exponent > 0:
        return operand
    if not operand.factor:
        return _unknown([operand], operand.factor == 0)
    return replace(operand, factor=operand.factor**exponent, extreme=None, sums=False)


def _unknown(operands: Sequence[Growth], is_one: bool) -> Growth:
    return replace(_common(operands), factor=1.0 if is_one else None, uneven=False, sums=False)


def _other(small: Equation, large: Equation, operands: Sequence[Growth]) -> Growth:
    """Return what any other operation makes: nothing is known of values that grow."""
    even = all(is_same(g.factor, 1) or g.factor == 0 for g in operands)
    elementwise = facts_of(small.primitive).batch is Batch.ELEMENTWISE
    pairs = zip(small.inputs, large.inputs, strict=True)
    joins = any(grows(s, x) for s, x in pairs) and not grows(small.outputs[0], large.outputs[0])
    found = _unknown(operands, even and (elementwise or not joins))
    is_literal = bool(operands) and all(g.literal is not None for g in operands)
    return replace(found, literal=1.0 if is_literal or small.name == "iota" else None)


def constant_of(small: Atom, large: Atom) -> Growth | None:
    """Return the growth of a literal; None for other operands."""
    if isinstance(small, Constant) and isinstance(large, Constant):
        return literal_growth(small.value, large.value)
    return None
