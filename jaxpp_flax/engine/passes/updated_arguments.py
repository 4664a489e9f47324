"""Find the argument that a loop's result updates: an accumulator takes the sharding of its gradient's parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim
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

    def search(result: Value, batch_dim: BatchDim | None) -> int | None:
        whole = tuple(result.aval.shape)
        shape = whole if batch_dim is None else (*whole[: batch_dim[0]], *whole[batch_dim[0] + 1 :])
        queue, seen = deque([(result, 0)]), {result}
        while queue:
            value, depth = queue.popleft()
            for equation in users.get(value, ()):
                for read in values(equation.inputs):
                    if read in position and tuple(read.aval.shape) == shape:
                        return position[read]
                for output in equation.outputs:
                    if tuple(output.aval.shape) in (shape, whole) and output not in seen and depth < _SEARCH_DEPTH:
                        seen.add(output)
                        queue.append((output, depth + 1))
        return None

    found: list[Equation | Loop] = []
    for node in nodes:
        if isinstance(node, Loop):
            node = replace(node, like=tuple(map(search, node.accumulator_results, node.batch_dims)))
        found.append(node)
    return found
