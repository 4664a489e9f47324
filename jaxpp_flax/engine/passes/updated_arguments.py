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
from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, values
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["Position", "arguments_of_sums", "updated_arguments"]

Position: TypeAlias = "int | None"
"""The position of an argument among the step's inputs."""


def updated_arguments(
    nodes: Sequence[Equation | Loop], inputs: Sequence[Value], outputs: Sequence[Atom], sums: Collection[Equation]
) -> tuple[tuple[Position, ...], dict[Loop, tuple[Position, ...]]]:
    """Return the argument of each output, and for each loop those of its accumulators; None where there is none.

    Args:
      nodes: the step's equations and loops.
      inputs: the step's arguments.
      outputs: the step's results.
      sums: the equations that add up the parts of an accumulated result.
    """
    edges = list(_edges(nodes, sums))
    arguments = _nearest(edges, [(0, k, value) for k, value in enumerate(inputs)])
    of_outputs: list[Position] = []
    for atom in outputs:
        found = arguments[atom].get(_type(atom)) if isinstance(atom, Value) and atom in arguments else None
        of_outputs.append(None if found is None else found[1])

    backwards = _reversed(edges)
    renewed = [(k, v) for k, v in zip(of_outputs, outputs, strict=True) if k is not None and isinstance(v, Value)]

    def of_loop(loop: Loop) -> tuple[Position, ...]:
        read = {min(arguments[v].values())[1] for v in loop.operands if arguments.get(v)}
        far = len(edges)  # further than any other
        results = _nearest(backwards, [(0 if k in read else far, k, v) for k, v in renewed])
        found: list[Position] = []
        for value, batch_dim in zip(loop.accumulator_results, loop.batch_dims, strict=True):
            shape = list(value.aval.shape)
            if batch_dim is not None:
                del shape[batch_dim[0]]
            found.append(_of_shape(results.get(value, {}), tuple(shape)))
        return tuple(found)

    return tuple(of_outputs), {node: of_loop(node) for node in nodes if isinstance(node, Loop)}


def arguments_of_sums(
    equations: Sequence[Equation],
    inputs: Sequence[Value],
    outputs: Sequence[Atom],
    starts: Iterable[Value],
    read: Collection[Value],
) -> dict[Value, int]:
    """Return the arguments that sums without a loop update, by the constants with which the sums start.

    `read` holds what the work that is summed reads: arguments among it come first, as those that a loop reads.
    """
    edges = list(_edges(equations, ()))
    of_outputs, _ = updated_arguments(equations, inputs, outputs, ())
    renewed = [
        (0 if inputs[k] in read else len(edges), k, v)
        for k, v in zip(of_outputs, outputs, strict=True)
        if k is not None and isinstance(v, Value)
    ]
    results = _nearest(_reversed(edges), renewed)
    found = {value: _of_shape(results.get(value, {}), tuple(value.aval.shape)) for value in starts}
    return {value: position for value, position in found.items() if position is not None}


def _of_shape(near: Mapping[tuple[Any, Any], tuple[int, int]], shape: tuple[int, ...]) -> Position:
    found = [at for (other, _), at in near.items() if other == shape]
    return min(found)[1] if found else None


def _reversed(edges: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    return [(end, start) for start, end in reversed(edges)]


def _edges(nodes: Iterable[Equation | Loop], sums: Collection[Equation]) -> Iterator[tuple[Value, Value]]:
    """Yield operands and results, in program order, where the result may be a new value of the operand."""
    for node in nodes:
        if isinstance(node, Loop):
            yield from zip(node.carry_init, node.carry_results, strict=True)
        elif is_condition(node):
            yield from _edges(select_between_branches(node), sums)
        else:
            read = values(node.inputs)
            is_view = len(read) == 1 and (node in sums or not facts_of(node.primitive).is_reduction)
            yield from ((a, b) for a in read for b in node.outputs if is_view or a.aval.shape == b.aval.shape)


def _type(atom: Atom) -> tuple[Any, Any]:
    return tuple(atom.aval.shape), atom.aval.dtype


def _nearest(
    edges: Iterable[tuple[Value, Value]], sources: Iterable[tuple[int, int, Value]]
) -> Mapping[Value, dict[tuple[Any, Any], tuple[int, int]]]:
    """Return for each value, of each type the nearest source from which edges lead to it: its distance and number.

    `sources` have a distance to begin with, and a number.
    """
    found: defaultdict[Value, dict[tuple[Any, Any], tuple[int, int]]] = defaultdict(dict)
    for distance, number, value in sources:
        found[value].setdefault(_type(value), (distance, number))
    for start, end in edges:
        for kind, (distance, number) in found.get(start, {}).items():
            if kind not in found[end] or distance + 1 < found[end][kind][0]:
                found[end][kind] = (distance + 1, number)
    return found
