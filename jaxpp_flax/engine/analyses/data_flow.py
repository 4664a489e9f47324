"""The flow of values in a graph: what a value is computed from, what reads it, and what makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, values

__all__ = ["ancestors", "makers_of", "use_counts"]


def ancestors(atoms: Iterable[Atom], producer: Mapping[Value, Equation]) -> Iterator[Value]:
    """Yield the values from which `producer`'s equations compute atoms; the atoms themselves come first."""
    stack, seen = values(atoms), set[Value]()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack.extend(values(producer[value].inputs) if value in producer else ())


def use_counts(equations: Iterable[Equation], outputs: Iterable[Atom]) -> Counter[Value]:
    """Count the reads of each value, by equations and as an output."""
    return Counter(values(chain(*(equation.inputs for equation in equations), outputs)))


def makers_of(
    equations: Sequence[Equation], wanted: Iterable[Value], kept: Collection[Value] = ()
) -> tuple[Equation, ...]:
    """Return those of some equations that compute the wanted values from the kept ones, in order."""
    needed = {v for v in wanted if v not in kept}
    found: list[Equation] = []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outputs):
            found.append(equation)
            needed.update(v for v in values(equation.inputs) if v not in kept)
    return tuple(reversed(found))
