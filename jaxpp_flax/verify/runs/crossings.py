"""What crosses the marks of a loop's body, and its choices; and how far each value is in the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import source_info_util

from jaxpp_flax.engine.tracing.inline import is_recomputation
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, bodies, from_jaxpr, inside, values
from jaxpp_flax.engine.tracing.markers import FORWARD, Mark, marker_p, segment_names
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.verify.runs.choices import Places, chosen

__all__ = ["AGAIN", "CHOICE", "Crossing", "block_at", "crossings_at_top", "number_of", "run_body"]

CHOICE, AGAIN = "choice", "recomputed"
_LITERAL = -1  # the phase of a value that is written into the program


@dataclass(frozen=True)
class Crossing:
    """The values that go through one mark, in one direction. `phase` is the number of marks that stand before it.

    Or a choice, of direction `CHOICE` or, recomputed for the backward pass, `AGAIN`: what it reads, and what it has
    chosen, the last `num_chosen` values. Choices of one `region` are recomputed together.
    """

    direction: str
    mark: Mark
    phase: int
    values: tuple[Any, ...]
    num_chosen: int = 0
    region: int = 0


def number_of(crossing: Crossing, before: Sequence[Crossing]) -> int:
    """Return how many of the crossings before have the direction and name of this one."""
    return sum(c.direction == crossing.direction and c.mark.name == crossing.mark.name for c in before)


def run_body(
    graph: Graph,
    operands: Sequence[Any],
    phases: Sequence[int],
    seen: list[Crossing],
    *,
    places: Places = frozenset(),
    force: Callable[[Crossing, int], Sequence[Any]] = lambda crossing, number: (),
    region: int = 0,
) -> tuple[list[Any], list[int]]:
    """Evaluate a loop's body as it is written, and append what crosses its marks, and its choices, to `seen`.

    This runs the plain step, so it uses none of the compiler's passes: it only enters calls with a mark or a choice.

    Args:
      graph: the body, or the inside of a call in it.
      operands: a value for each of its inputs.
      phases: for each operand, the number of marks before it.
      seen: gets the crossings, in order of the program.
      places: where choices are made.
      force: returns the values that take the place of a choice, given with its number.
      region: not 0 if the graph recomputes values for a backward: then its forward marks were seen before.

    Returns:
      The results, and the number of marks before each of them.
    """
    environment = dict(zip(graph.inputs, zip(operands, phases, strict=True), strict=True))

    def read(atom: Atom) -> tuple[Any, int]:
        return (atom.value, _LITERAL) if isinstance(atom, Constant) else environment[atom]

    outer = source_info_util.current_name_stack()
    for equation in graph.equations:
        inputs = [read(atom) for atom in equation.inputs]
        given, before = [value for value, _ in inputs], [phase for _, phase in inputs]
        phase = max([0, *before])
        inner = _entered(equation, places)
        if equation.primitive is marker_p:
            results: Sequence[Any] = given
            if not (region and equation.params["direction"] == FORWARD):
                seen.append(_crossing(equation, phase, given))
                phase += 1
            after = [phase] * len(given)
        elif inner is not None:
            again = is_recomputation(equation)
            body, constants = from_jaxpr(inner, transposed=equation.transposed and not again)
            own = region or (len(seen) + 1) * again
            known = [_LITERAL] * len(constants) + before
            results, after = run_body(body, [*constants, *given], known, seen, places=places, force=force, region=own)
        else:
            with equation.named_within(outer):
                results = equation.bind(*given)
            after = [phase] * len(results)
            if which := chosen(graph, equation, places):
                own = region or (len(seen) + 1) * equation.transposed
                reads = [value for value, before in inputs if before != _LITERAL]
                results = list(results)
                crossing = _choice(equation, phase, reads, [results[i] for i in which], own)
                for i, value in zip(which, force(crossing, number_of(crossing, seen)), strict=True):
                    results[i] = value
                seen.append(crossing)
        environment.update(zip(equation.outputs, zip(results, after, strict=True), strict=True))
    found = [read(atom) for atom in graph.outputs]
    return [value for value, _ in found], [phase for _, phase in found]


def _entered(equation: Equation, places: Places) -> Any:
    """Return the jaxpr of a call that holds a mark, or may hold a choice; None for other equations."""
    if not bodies(equation.params) or not (places or any(e.primitive is marker_p for e in inside(equation.params))):
        return None
    return facts_of(equation.primitive).body_in(equation.params)


def _choice(equation: Equation, phase: int, reads: Sequence[Any], made: Sequence[Any], region: int) -> Crossing:
    mark = Mark(f"{equation.name} at {equation.where}", False, equation.where)
    return Crossing(AGAIN if region else CHOICE, mark, phase, (*reads, *made), len(made), region)


def _crossing(equation: Any, phase: int, values: Sequence[Any]) -> Crossing:
    params = equation.params
    return Crossing(
        params["direction"], Mark(params["name"], params["closes_block"], equation.where), phase, tuple(values)
    )


def crossings_at_top(graph: Graph, places: Places) -> list[Crossing]:
    """Return the crossings of a graph whose marks and choices stand at its top; their values are its own atoms.

    The region of a recomputed choice is the position behind its equation.
    """
    found: list[Crossing] = []
    for i, e in enumerate(graph.equations):
        if e.primitive is marker_p:
            found.append(_crossing(e, 0, e.inputs))
        elif which := chosen(graph, e, places):
            found.append(
                _choice(e, 0, values(e.inputs), [e.outputs[j] for j in which], (i + 1) * (e.late or e.transposed))
            )
    return found


def block_at(phase: int, seen: Sequence[Crossing]) -> str:
    """Return the name of the block that computes a value after so many marks: up the blocks, and down again.

    Example:
      >>> there = [Crossing(FORWARD, Mark(name, True, ""), i, ()) for i, name in enumerate("ab")]
      >>> back = [Crossing("backward", Mark(name, True, ""), i + 2, ()) for i, name in enumerate("ba")]
      >>> [block_at(phase, [*there, *back]) for phase in range(5)]
      ['a', 'b', 'after_b', 'b', 'a']
    """
    marks = [crossing.mark for crossing in seen if crossing.direction == FORWARD]
    names = segment_names(marks)
    last = len(marks)
    return names[max(0, phase if phase <= last else 2 * last - phase)]
