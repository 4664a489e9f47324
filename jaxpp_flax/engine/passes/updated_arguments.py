"""Find the argument that a loop's result updates: an accumulator takes the sharding of its gradient's parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim
from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, values

__all__ = ["find_relatives"]

_SEARCH_DEPTH = 24  # equations between a gradient and its argument: clipping, scaling, moments


def find_relatives(
    nodes: Sequence[Equation | Loop], inputs: Sequence[Value], outputs: Sequence[Atom] = ()
) -> list[Equation | Loop]:
    """Return the same nodes; each loop now knows the argument that each accumulator updates.

    It is the first argument that is combined with the accumulator and has a new value among the step's `outputs`; if
    none has, the first one of all. A mask of the gradient has no new value.
    """
    renewed = _renewed(nodes, inputs, outputs)
    position = {v: i for i, v in enumerate(inputs)}
    users: dict[Value, list[Equation]] = {}
    for node in nodes:
        if isinstance(node, Equation):
            for value in values(node.inputs):
                users.setdefault(value, []).append(node)

    def search(result: Value, batch_dim: BatchDim | None) -> int | None:
        whole = tuple(result.aval.shape)
        shape = whole if batch_dim is None else (*whole[: batch_dim[0]], *whole[batch_dim[0] + 1 :])
        queue, seen, combined = deque([(result, 0)]), {result}, list[Value]()
        while queue:
            value, depth = queue.popleft()
            for equation in users.get(value, ()):
                read = [v for v in values(equation.inputs) if v in position and tuple(v.aval.shape) == shape]
                combined += read
                if not renewed.isdisjoint(read):
                    return next(position[v] for v in read if v in renewed)
                for output in equation.outputs:
                    if tuple(output.aval.shape) in (shape, whole) and output not in seen and depth < _SEARCH_DEPTH:
                        seen.add(output)
                        queue.append((output, depth + 1))
        return position[combined[0]] if combined else None

    found: list[Equation | Loop] = []
    for node in nodes:
        if isinstance(node, Loop):
            node = replace(node, like=tuple(map(search, node.accumulator_results, node.batch_dims)))
        found.append(node)
    return found


def _renewed(nodes: Sequence[Equation | Loop], inputs: Sequence[Value], outputs: Sequence[Atom]) -> set[Value]:
    """Return the arguments with a new value among the outputs: of each output, the nearest argument of its type."""
    producer = {v: node for node in nodes if isinstance(node, Equation) for v in node.outputs}
    arguments = set(inputs)

    def nearest(output: Value) -> Value | None:
        queue, seen = deque([(output, 0)]), {output}
        while queue:
            value, depth = queue.popleft()
            if value in arguments and (value.aval.shape, value.aval.dtype) == (output.aval.shape, output.aval.dtype):
                return value
            equation = producer.get(value)
            for read in values(equation.inputs) if equation is not None and depth < _SEARCH_DEPTH else ():
                if read not in seen:
                    seen.add(read)
                    queue.append((read, depth + 1))
        return None

    made = [atom for atom in outputs if isinstance(atom, Value) and atom not in arguments]
    return {found for atom in made if (found := nearest(atom)) is not None}
