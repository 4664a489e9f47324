"""The values to keep so that the rest follows by cheap operations: the least bytes, found as a minimum cut.

A cheap operation passes over its operands once: it is elementwise, a reduction, or a change of layout. Norms, softmax,
activations and masks of dropout are made of these. Products, convolutions, loops, collectives and kernels are costly,
and so is every primitive that is not known here. JAX's policy `dots_saveable` draws the same line, and saves every
product. A minimum cut, as in PyTorch's partitioner of traced gradients, may also save what is smaller behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, inside, values

__all__ = ["CheapCut", "cheap_cut", "is_cheap", "makers_of", "nearest_cut"]

_CHEAP = frozenset(
    {"abs", "acos", "acosh", "add", "add_any", "and", "argmax", "argmin", "asin", "asinh", "atan", "atan2", "atanh",
     "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "clz", "complex", "concatenate", "conj",
     "convert_element_type", "copy", "copy_p", "cos", "cosh", "cumlogsumexp", "cummax", "cummin", "cumprod",
     "cumsum", "div", "dynamic_slice", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims",
     "expm1", "floor", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "le_to", "log", "log1p", "log2",
     "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not",
     "one_minus_square", "or", "pad", "polynomial", "population_count", "pow", "random_bits", "random_fold_in",
     "random_seed", "random_split", "random_unwrap", "random_wrap", "real", "reduce_and", "reduce_max", "reduce_min",
     "reduce_or", "reduce_precision", "reduce_prod", "reduce_sum", "rem", "reshape", "rev", "round", "rsqrt",
     "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "slice",
     "split", "sqrt", "square", "squeeze", "stack", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "tile",
     "transpose", "unstack", "xor"}
)  # fmt: skip
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
_CHEAP_INSIDE_A_CALL = _CHEAP | _CALLS

_SMALL = 0.01  # of the largest wanted value: what is smaller is not worth a pass over larger values


def is_cheap(equation: Any) -> bool:
    """Return True if an equation passes over its operands once, as do those inside it."""
    if equation.effects:
        return False
    name = equation.primitive.name
    return name in _CHEAP or (
        name in _CALLS and all(e.primitive.name in _CHEAP_INSIDE_A_CALL for e in inside(equation.params))
    )


@dataclass(frozen=True)
class CheapCut:
    """What to keep, and what to compute again.

    Attributes:
      kept: the values to keep, in the order of their definition; inputs of the graph come first.
      equations: the equations that compute the other wanted values from these, in order.
      again: these other wanted values.
    """

    kept: tuple[Value, ...]
    equations: tuple[Equation, ...]
    again: tuple[Value, ...]

    @property
    def moved_bytes(self) -> int:
        """The bytes that the equations read and write if they are fused: what they read first, and what is wanted."""
        made = {v for e in self.equations for v in e.outputs}
        read = {v for e in self.equations for v in values(e.inputs)} - made
        return sum(v.nbytes for v in (*read, *self.again))


def cheap_cut(graph: Graph, wanted: Sequence[Value], free: Collection[Value], held: Collection[Value]) -> CheapCut:
    """Return the values with the fewest bytes from which cheap equations of a graph compute the wanted ones.

    Among cuts of equal bytes, the one with the least to compute is taken.

    Args:
      graph: the graph that makes the wanted values.
      wanted: the values that somebody reads later.
      free: inputs that are there at any time.
      held: values that are kept in any case.
    """
    readers: dict[Value, list[Value]] = {}
    made = [*graph.inputs]
    sources = [v for v in graph.inputs if v not in free]
    for equation in graph.equations:
        made += equation.outputs
        if is_cheap(equation):
            for value in values(equation.inputs):
                readers.setdefault(value, []).extend(equation.outputs)
        else:
            sources += equation.outputs
    small = _SMALL * max((v.nbytes for v in wanted), default=0)
    cost = {v: 0 if v in held or v.nbytes < small else v.nbytes for v in made}
    sources += [v for v in made if v in held and v not in free]
    cut = nearest_cut(made, readers, cost, sources, wanted)
    kept = tuple(v for v in made if v in cut)
    again = tuple(v for v in dict.fromkeys(wanted) if v not in cut)
    return CheapCut(kept, makers_of(graph.equations, again, cut), again)


def makers_of(equations: Sequence[Equation], wanted: Iterable[Value], kept: Collection[Value]) -> tuple[Equation, ...]:
    """Return the equations that compute the wanted values from the kept ones, in order."""
    needed = {v for v in wanted if v not in kept}
    found: list[Equation] = []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outputs):
            found.append(equation)
            needed.update(v for v in values(equation.inputs) if v not in kept)
    return tuple(reversed(found))


def nearest_cut(
    nodes: Sequence[Any],
    edges: Mapping[Any, Iterable[Any]],
    cost: Mapping[Any, int],
    sources: Iterable[Any],
    sinks: Iterable[Any],
) -> set[Any]:
    """Return the nodes of least cost without which no path leads from a source to a sink; the nearest to the sinks.

    This is the maximum flow by shortest augmenting paths ("Theoretical Improvements in Algorithmic Efficiency for
    Network Flow Problems", 1972), with each node as an edge from its entry to its exit. Nodes to which no source leads
    are never cut.

    Example:
      >>> edges = {"x": ["y"], "y": ["a", "b"]}
      >>> sorted(nearest_cut("xyab", edges, {"x": 2, "y": 2, "a": 1, "b": 1}, "x", "ab"))
      ['a', 'b']
      >>> nearest_cut("xyab", edges, {"x": 2, "y": 1, "a": 1, "b": 1}, "x", "ab")
      {'y'}
    """
    number = {node: n for n, node in enumerate(nodes)}
    flow = _Flow(2 * len(number) + 2)
    start, end = 2 * len(number), 2 * len(number) + 1
    endless = sum(cost.values()) + 1
    sources = [*dict.fromkeys(sources)]
    reached = _reached(sources, edges)
    for node in reached:
        n = number[node]
        flow.connect(2 * n, 2 * n + 1, cost[node])
        for reader in dict.fromkeys(edges.get(node, ())):
            flow.connect(2 * n + 1, 2 * number[reader], endless)
    for node in sources:
        flow.connect(start, 2 * number[node], endless)
    for node in (n for n in dict.fromkeys(sinks) if n in reached):
        flow.connect(2 * number[node] + 1, end, endless)
    while flow.augment(start, end):
        pass
    near = flow.reaching(end)
    return {node for node in reached if 2 * number[node] + 1 in near and 2 * number[node] not in near}


def _reached(sources: Sequence[Any], edges: Mapping[Any, Iterable[Any]]) -> dict[Any, None]:
    found, stack = dict.fromkeys(sources), [*sources]
    while stack:
        new = [n for n in dict.fromkeys(edges.get(stack.pop(), ())) if n not in found]
        found |= dict.fromkeys(new)
        stack += new
    return found


class _Flow:
    """A network with what its edges can still carry; edge `e` and its opposite `e ^ 1` share an end."""

    def __init__(self, count: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(count)]
        self.target: list[int] = []
        self.room: list[int] = []

    def connect(self, source: int, target: int, capacity: int) -> None:
        for one, other, room in ((source, target, capacity), (target, source, 0)):
            self.edges[one].append(len(self.target))
            self.target.append(other)
            self.room.append(room)

    def augment(self, start: int, end: int) -> bool:
        """Send as much as one more path can carry; return False if no path is left."""
        came_by: dict[int, int] = {start: -1}
        queue = deque([start])
        while queue and end not in came_by:
            for edge in self.edges[queue.popleft()]:
                target = self.target[edge]
                if self.room[edge] and target not in came_by:
                    came_by[target] = edge
                    queue.append(target)
        if end not in came_by:
            return False
        path: list[int] = []
        while (edge := came_by[end]) >= 0:
            path.append(edge)
            end = self.target[edge ^ 1]
        amount = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        return True

    def reaching(self, end: int) -> set[int]:
        """Return the nodes from which a path with room leads to `end`."""
        found, stack = {end}, [end]
        while stack:
            for edge in self.edges[stack.pop()]:
                if self.room[edge ^ 1] and self.target[edge] not in found:
                    found.add(self.target[edge])
                    stack.append(self.target[edge])
        return found
