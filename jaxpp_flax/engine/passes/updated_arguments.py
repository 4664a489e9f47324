"""Find the argument that a loop's result updates: an accumulator takes the sharding of its gradient's parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.tracing.ir import Equation, Value, values

__all__ = ["find_relatives"]

_SEARCH_DEPTH = 24  # equations between a gradient and its argument: clipping, scaling, moments


def find_relatives(nodes: Sequence[Equation | Loop], inputs: Sequence[Value]) -> list[Equation | Loop]:
    """Return the same nodes; each loop now knows the first argument that is combined with each accumulator."""
    position = {v: i for i, v in enumerate(inputs)}
    users: dict[Value, list[Equation]] = {}
    for node in nodes:
        if isinstance(node, Equation):
            for value in values(node.inputs):
                users.setdefault(value, []).append(node)

    def search(result: Value, shape: tuple[int, ...]) -> int | None:
        queue, seen = deque([(result, 0)]), {result}
        while queue:
            value, depth = queue.popleft()
            for equation in users.get(value, ()):
                for read in values(equation.inputs):
                    if read in position and tuple(read.aval.shape) == shape:
                        return position[read]
                for output in equation.outputs:
                    if tuple(output.aval.shape) == shape and output not in seen and depth < _SEARCH_DEPTH:
                        seen.add(output)
                        queue.append((output, depth + 1))
        return None

    found: list[Equation | Loop] = []
    for node in nodes:
        if isinstance(node, Loop):
            like: list[int | None] = []
            for value, leading in zip(node.accumulator_results, node.leading, strict=True):
                shape = tuple(value.aval.shape)
                like.append(search(value, shape if leading is None else shape[1:]))
            node = replace(node, like=tuple(like))
        found.append(node)
    return found
