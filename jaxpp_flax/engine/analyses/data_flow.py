"""The flow of values in a graph: what a value is computed from, what reads it, and what makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, values

__all__ = ["ancestors", "makers_of", "needed_by", "use_counts"]


def ancestors(atoms: Iterable[Atom], producer: Mapping[Value, Equation]) -> Iterator[Value]:
    """Yield the values from which `producer`'s equations compute atoms; the atoms themselves come first."""
    stack, seen = values(atoms), set[Value]()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack.extend(values(producer[value].inputs) if value in producer else ())


def use_counts(
    equations: Iterable[Equation], outputs: Iterable[Atom], resolve: Callable[[Atom], Atom] = lambda atom: atom
) -> Counter[Value]:
    """Count the reads of each value, by equations and as an output; `resolve` may look through identities."""
    reads = chain(*(equation.inputs for equation in equations), outputs)
    return Counter(values(map(resolve, reads)))


def makers_of(equations: Sequence[Equation], wanted: Iterable[Value], kept: Collection[Value]) -> tuple[Equation, ...]:
    """Return the equations that compute the wanted values from the kept ones, in order."""
    needed = {v for v in wanted if v not in kept}
    found: list[Equation] = []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outputs):
            found.append(equation)
            needed.update(v for v in values(equation.inputs) if v not in kept)
    return tuple(reversed(found))


def needed_by(
    equations: Sequence[Equation], wanted: Iterable[Value], resolve: Callable[[Atom], Atom] = lambda atom: atom
) -> set[Equation]:
    """Return those of some equations that make the wanted values.

    Of a backward task, these make the cotangents that leave the stage; the others make weight gradients.
    """
    read: set[Atom] = set(wanted)
    found: set[Equation] = set()
    for equation in reversed(equations):
        if not read.isdisjoint(equation.outputs):
            found.add(equation)
            read.update(map(resolve, equation.inputs))
    return found
