"""The producer of each value, the number of its reads, and the work that values need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value

__all__ = ["needed_by", "producers", "use_counts"]


def producers(equations: Iterable[Equation]) -> dict[Value, Equation]:
    """Return the equation that makes each value."""
    return {value: equation for equation in equations for value in equation.outputs}


def use_counts(
    equations: Iterable[Equation], outputs: Iterable[Atom], resolve: Callable[[Atom], Atom] = lambda atom: atom
) -> dict[Value, int]:
    """Count the reads of each value, by equations and as an output; `resolve` may look through identities."""
    counts: dict[Value, int] = {}
    for atoms in (*(equation.inputs for equation in equations), outputs):
        for atom in map(resolve, atoms):
            if isinstance(atom, Value):
                counts[atom] = counts.get(atom, 0) + 1
    return counts


def needed_by(
    equations: Sequence[Equation], wanted: Iterable[Value], resolve: Callable[[Atom], Atom] = lambda atom: atom
) -> set[Equation]:
    """Return those of some equations that make the wanted values.

    Of a backward task, these make the cotangents that leave the stage; the others make weight gradients.
    """
    values: set[Atom] = set(wanted)
    found: set[Equation] = set()
    for equation in reversed(equations):
        if not values.isdisjoint(equation.outputs):
            found.add(equation)
            values.update(map(resolve, equation.inputs))
    return found
