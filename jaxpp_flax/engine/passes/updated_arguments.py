"""Which argument of a step a result updates, and which one an accumulator of a loop updates.

A result is the new value of the nearest argument of its type that it is computed from: of `p - rate * m` that is `p`,
not a moment `m`. Nearest means fewest equations, and only those count that keep the shape, or make a view of a single
operand: a norm is no new value of anything.

An accumulator updates the argument of the nearest such result of its shape that is computed from it. Arguments that its
loop reads come first: a moment is not read by the loop, and a mask has no new value, so a gradient finds its parameter
behind both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jaxpp_flax.engine.passes.conditions import is_condition, select_between_branches
from jaxpp_flax.engine.passes.loop.loop import Loop
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["arguments_of_sums", "updated_arguments"]

# The position of an argument among the step's inputs.
_Position: TypeAlias = "int | None"


def updated_arguments(
    step: Graph, sums: Collection[Equation], loops: Iterable[Loop]
) -> tuple[tuple[_Position, ...], dict[Equation, tuple[_Position, ...]]]:
    """Return the argument of each output, and for each loop those of its accumulators; None where there is none.

    Args:
      step: the step, with loops that return their accumulators.
      sums: the equations that add up the parts of an accumulated result.
      loops: the loops of which the accumulators are wanted.
    """
    edges = list(_edges(step.equations, sums))
    arguments = _nearest(edges, [(0, k, value) for k, value in enumerate(step.inputs)])
    of_outputs: list[_Position] = []
    for atom in step.outputs:
        nearest_argument = arguments[atom].get(_type(atom)) if isinstance(atom, Value) and atom in arguments else None
        of_outputs.append(None if nearest_argument is None else nearest_argument[1])

    def of_loop(loop: Loop) -> tuple[_Position, ...]:
        constants = values(loop.constants)
        read = {min(arguments[v].values())[1] for v in constants if arguments.get(v)}
        results, positions = _renewed(step, edges, of_outputs, read), list[_Position]()
        for value, batch_dim in zip(loop.results, loop.batch_dims, strict=True):
            shape = list(value.aval.shape)
            if batch_dim is not None:
                del shape[batch_dim[0]]
            positions.append(_of_shape(results.get(value, {}), tuple(shape)))
        return tuple(positions)

    return tuple(of_outputs), {loop: of_loop(loop) for loop in loops}


def arguments_of_sums(step: Graph, starts: Iterable[Value], read: Collection[Value]) -> dict[Value, int]:
    """Return the arguments that sums without a loop update, by the constants with which the sums start.

    `read` holds what the work that is summed reads: arguments among it come first, as those that a loop reads.
    """
    of_outputs, _ = updated_arguments(step, (), ())
    first = {k for k, value in enumerate(step.inputs) if value in read}
    results = _renewed(step, list(_edges(step.equations, ())), of_outputs, first)
    positions = {value: _of_shape(results.get(value, {}), tuple(value.aval.shape)) for value in starts}
    return {value: position for value, position in positions.items() if position is not None}


def _renewed(
    step: Graph, edges: Sequence[tuple[Value, Value]], of_outputs: Sequence[_Position], read: Collection[int]
) -> Mapping[Value, dict[tuple[Any, Any], tuple[int, int]]]:
    """Return for each value the arguments whose new values are computed from it; those that are `read` come first."""
    far = len(edges)  # further than any other
    renewed = [(k, v) for k, v in zip(of_outputs, step.outputs, strict=True) if k is not None and isinstance(v, Value)]
    backwards = [(end, start) for start, end in reversed(edges)]
    return _nearest(backwards, [(0 if k in read else far, k, v) for k, v in renewed])


def _of_shape(near: Mapping[tuple[Any, Any], tuple[int, int]], shape: tuple[int, ...]) -> _Position:
    candidates = [position for (other, _), position in near.items() if other == shape]
    return min(candidates)[1] if candidates else None


def _edges(equations: Iterable[Equation], sums: Collection[Equation]) -> Iterator[tuple[Value, Value]]:
    """Yield operands and results, in program order, where the result may be a new value of the operand."""
    for equation in equations:
        if isinstance(equation, Loop):
            carry = zip(equation.carry_init, equation.carry_results, strict=True)
            yield from ((start, end) for start, end in carry if isinstance(start, Value))
        elif is_condition(equation):
            yield from _edges(select_between_branches(equation), sums)
        else:
            read = values(equation.inputs)
            is_view = len(read) == 1 and (equation in sums or not facts_of(equation.primitive).is_reduction)
            yield from ((a, b) for a in read for b in equation.outputs if is_view or a.aval.shape == b.aval.shape)


def _type(atom: Value) -> tuple[Any, Any]:
    return tuple(atom.aval.shape), atom.aval.dtype


def _nearest(
    edges: Iterable[tuple[Value, Value]], sources: Iterable[tuple[int, int, Value]]
) -> Mapping[Value, dict[tuple[Any, Any], tuple[int, int]]]:
    """Return for each value, of each type the nearest source from which edges lead to it: its distance and number.

    `sources` have a distance to begin with, and a number.
    """
    nearest: defaultdict[Value, dict[tuple[Any, Any], tuple[int, int]]] = defaultdict(dict)
    for distance, number, value in sources:
        nearest[value].setdefault(_type(value), (distance, number))
    for start, end in edges:
        for kind, (distance, number) in nearest.get(start, {}).items():
            if kind not in nearest[end] or distance + 1 < nearest[end][kind][0]:
                nearest[end][kind] = (distance + 1, number)
    return nearest
