"""The producer of each value, and the number of its reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value

__all__ = ["producers", "use_counts"]


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
