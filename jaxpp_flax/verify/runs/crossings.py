"""What crosses the marks of a loop's body, forward and backward, and how far each value is in the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import source_info_util

from jaxpp_flax.engine.tracing.inline import is_recomputation
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Graph, bodies, from_jaxpr, inside
from jaxpp_flax.engine.tracing.markers import BACKWARD, FORWARD, Mark, marker_p, segment_names
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["Crossing", "block_at", "marks_at_top", "run_body"]


@dataclass(frozen=True)
class Crossing:
    """The values that go through one mark, in one direction. `phase` is the number of marks that stand before it."""

    direction: str
    mark: Mark
    phase: int
    values: tuple[Any, ...]


def run_body(
    graph: Graph,
    operands: Sequence[Any],
    phases: Sequence[int],
    seen: list[Crossing],
    *,
    recomputes: bool = False,
) -> tuple[list[Any], list[int]]:
    """Evaluate a loop's body as it is written, and append what crosses its marks to `seen`.

    This is the plain side, so it uses none of the compiler's passes: it only enters the calls that hold a mark.

    Args:
      graph: the body, or the inside of a call in it.
      operands: a value for each of its inputs.
      phases: for each operand, the number of marks before it.
      seen: gets the crossings, in order of the program.
      recomputes: the graph recomputes values for a backward: its forward marks were seen before.

    Returns:
      The results, and the number of marks before each of them.
    """
    environment = dict(zip(graph.inputs, zip(operands, phases, strict=True), strict=True))

    def read(atom: Atom) -> tuple[Any, int]:
        return (atom.value, 0) if isinstance(atom, Constant) else environment[atom]

    outer = source_info_util.current_name_stack()
    for equation in graph.equations:
        inputs = [read(atom) for atom in equation.inputs]
        values, before = [value for value, _ in inputs], [phase for _, phase in inputs]
        phase = max(before, default=0)
        inner = _with_marks(equation)
        if equation.primitive is marker_p:
            results: Sequence[Any] = values
            if not (recomputes and equation.params["direction"] == FORWARD):
                seen.append(_crossing(equation, phase, values))
                phase += 1
            after = [phase] * len(values)
        elif inner is not None:
            body, constants = from_jaxpr(inner)
            again = recomputes or is_recomputation(equation)
            results, after = run_body(
                body, [*constants, *values], [0] * len(constants) + before, seen, recomputes=again
            )
        else:
            with equation.named_within(outer):
                results = equation.bind(*values)
            after = [phase] * len(results)
        environment.update(zip(equation.outputs, zip(results, after, strict=True), strict=True))
    found = [read(atom) for atom in graph.outputs]
    return [value for value, _ in found], [phase for _, phase in found]


def _with_marks(equation: Any) -> Any:
    """Return the jaxpr of a call that holds a mark; None for other equations."""
    if not bodies(equation.params) or not any(e.primitive is marker_p for e in inside(equation.params)):
        return None
    return facts_of(equation.primitive).body_in(equation.params)


def _crossing(equation: Any, phase: int, values: Sequence[Any]) -> Crossing:
    params = equation.params
    return Crossing(
        params["direction"], Mark(params["name"], params["closes_block"], equation.where), phase, tuple(values)
    )


def marks_at_top(graph: Graph) -> list[Crossing]:
    """Return the crossings of a graph whose marks all stand at its top; their values are the graph's own atoms."""
    return [_crossing(e, 0, e.inputs) for e in graph.equations if e.primitive is marker_p]


def block_at(phase: int, seen: Sequence[Crossing]) -> str:
    """Return the name of the block that computes a value after so many marks: up the blocks, and down again.

    Example:
      >>> there = [Crossing(FORWARD, Mark(name, True, ""), i, ()) for i, name in enumerate("ab")]
      >>> back = [Crossing(BACKWARD, Mark(name, True, ""), i + 2, ()) for i, name in enumerate("ba")]
      >>> [block_at(phase, [*there, *back]) for phase in range(5)]
      ['a', 'b', 'after_b', 'b', 'a']
    """
    marks = [crossing.mark for crossing in seen if crossing.direction != BACKWARD]
    names = segment_names(marks)
    last = len(marks)
    return names[phase if phase <= last else max(2 * last - phase, 0)]
