"""Reduce data-parallel gradients once, after the loop, instead of in every microbatch.

On an Auto mesh a weight gradient contracts the sharded batch dimension, and XLA adds an all-reduce to every backward
task. Here that contraction keeps the shards apart: with D shards, the gradient of shape (...) becomes D partial
gradients of shape (D, ...), each on the device that made it; these are accumulated, and their sum over the first
axis, taken after the loop, is the one reduction. A gradient qualifies if it is linear in contractions over the batch
dimension, each used for nothing else; the others are left as they are, which is slower and no less right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.ir import Atom, Constant, Equation, Graph, Value, from_jaxpr, prune, struct_of
from jaxpp_flax.engine.loop import AddOp, Op
from jaxpp_flax.engine.markers import marker_p
from jaxpp_flax.engine.passes.batch_dims import BatchDim, propagate

__all__ = ["Deferred", "defer_reductions"]

_LINEAR_UNARY = frozenset(
    {"transpose", "reshape", "convert_element_type", "neg", "copy", "copy_p", "broadcast_in_dim", "squeeze",
     "expand_dims", "reduce_sum", "slice", "stop_gradient", "name"}
)  # fmt: skip


class Deferred(NamedTuple):
    """The new body; `axes[k]` are the mesh axes over which result k is still to be summed, or None."""

    body: Graph
    axes: tuple[Any, ...]


def defer_reductions(
    body: Graph,
    num_carry: int,
    operations: Sequence[Op],
    known: Mapping[Value, BatchDim],
    size: Callable[[Any], int],
    may_defer: Callable[[Value, Any], bool] = lambda value, axes: True,
) -> Deferred:
    """Rewrite the gradients of an inlined body that can be summed over the data axis after the loop.

    Args:
      body: plain calls inlined.
      num_carry: number of outputs before the results.
      operations: of the results; only sums are deferred.
      known: batch dimensions of the body's inputs.
      size: number of shards over given mesh axes.
      may_defer: whether a gradient may be kept as one partial sum per shard; not where the parameter itself is
        sharded over the same axes (FSDP), for the partial sums would undo that.
    """
    dims = propagate(body.equations, known, size)
    finder = _Finder(body, dims)
    outputs = list(body.outputs)
    axes: list[Any] = [None] * len(operations)
    added: list[Equation] = []
    for k, op in enumerate(operations):
        atom = outputs[num_carry + k]
        if not isinstance(op, AddOp) or not isinstance(atom, Value) or not atom.aval.shape:
            continue
        chain = finder.chain(atom)
        if chain is None or not may_defer(atom, chain.axes):
            continue
        equations, outputs[num_carry + k] = _partial_sums(chain, atom, dims, size(chain.axes))
        axes[k] = chain.axes
        added.extend(equations)
    if not added:
        return Deferred(body, tuple(axes))
    return Deferred(prune(_ordered(body, outputs, added)), tuple(axes))


@dataclass(frozen=True)
class _Chain:
    """The equations from the contractions over the batch to one gradient, in order."""

    equations: tuple[Equation, ...]
    axes: Any
    split: frozenset[Value]


class _Finder:
    def __init__(self, body: Graph, dims: Mapping[Value, BatchDim]) -> None:
        self.dims = dims
        self.producer = {v: e for e in body.equations for v in e.outputs}
        self.order = {e: i for i, e in enumerate(body.equations)}
        self.users: dict[Value, int] = {}
        for equation in body.equations:
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    self.users[atom] = self.users.get(atom, 0) + 1
        for atom in body.outputs:
            if isinstance(atom, Value):
                self.users[atom] = self.users.get(atom, 0) + 1

    def chain(self, value: Value) -> _Chain | None:
        equations: list[Equation] = []
        split: set[Value] = set()
        axes: set[Any] = set()
        if not self._visit(value, equations, split, axes) or len(axes) != 1:
            return None
        ordered = sorted(dict.fromkeys(equations), key=self.order.__getitem__)
        return _Chain(tuple(ordered), axes.pop(), frozenset(split))

    def _visit(self, value: Atom, equations: list[Equation], split: set[Value], axes: set[Any]) -> bool:
        """Whether `value` is linear in contractions over the batch; collects what lies between."""
        equation = self.producer.get(value) if isinstance(value, Value) else None
        if equation is None or self.users.get(value, 0) != 1 or value in self.dims:  # type: ignore[arg-type]
            return False
        tagged = [a for a in equation.inputs if isinstance(a, Value) and a in self.dims]
        if tagged:
            if not self._contracts_batch(equation, tagged):
                return False
            split.update(tagged)
            axes.update(self.dims[a][1] for a in tagged)
        elif equation.name in ("add", "add_any"):
            if not all(self._visit(a, equations, split, axes) for a in equation.inputs):
                return False
        elif equation.name in _LINEAR_UNARY:
            if not self._visit(equation.inputs[0], equations, split, axes):
                return False
        elif equation.name in ("mul", "div", "dot_general"):
            first, second = equation.inputs
            if self._depends(second):
                if equation.name == "div" or self._depends(first):
                    return False
                first = second
            if not self._visit(first, equations, split, axes):
                return False
        else:
            return False
        equations.append(equation)
        return True

    def _depends(self, atom: Atom) -> bool:
        """Whether an operand comes, through untagged values, from a contraction over the batch."""
        stack, seen = [atom], set[Atom]()
        while stack:
            current = stack.pop()
            if not isinstance(current, Value) or current in seen:
                continue
            seen.add(current)
            if current in self.dims:
                return True
            equation = self.producer.get(current)
            if equation is not None and equation.primitive is not marker_p:
                stack.extend(equation.inputs)
        return False

    def _contracts_batch(self, equation: Equation, tagged: Sequence[Value]) -> bool:
        if equation.name == "dot_general":
            (lc, rc), _ = equation.params["dimension_numbers"]
            left, right = equation.inputs
            if left not in self.dims or right not in self.dims:
                return False
            a, b = self.dims[left][0], self.dims[right][0]  # type: ignore[index]
            return a in lc and b in rc and tuple(lc).index(a) == tuple(rc).index(b)
        if equation.name == "reduce_sum":
            return self.dims[tagged[0]][0] in equation.params["axes"]
        if equation.name in ("scatter-add", "scatter_add"):
            operand, indices, updates = equation.inputs
            numbers = equation.params["dimension_numbers"]
            if operand in self.dims or indices not in self.dims or updates not in self.dims:
                return False
            if numbers.operand_batching_dims or numbers.scatter_indices_batching_dims or not self._is_zero(operand):
                return False
            at = self.dims[indices][0]  # type: ignore[index]
            free = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
            return at < len(free) and free[at] == self.dims[updates][0]  # type: ignore[index]
        return False

    def _is_zero(self, atom: Atom) -> bool:
        """Whether an operand is a broadcast literal zero: copies of it may be added without a trace."""
        if isinstance(atom, Constant):
            return not np.any(np.asarray(atom.value))
        equation = self.producer.get(atom)
        return equation is not None and equation.name == "broadcast_in_dim" and self._is_zero(equation.inputs[0])


def _partial_sums(
    chain: _Chain, value: Value, dims: Mapping[Value, BatchDim], shards: int
) -> tuple[list[Equation], Value]:
    """The chain once for each shard, as one vectorised computation."""
    inside = {v for e in chain.equations for v in e.outputs}
    inputs = tuple(
        dict.fromkeys(a for e in chain.equations for a in e.inputs if isinstance(a, Value) and a not in inside)
    )
    graph = Graph(inputs, (value,), chain.equations)
    axes = tuple(dims[v][0] if v in chain.split else None for v in inputs)

    def run(*operands: Any) -> Any:
        parts: list[Any] = []
        for operand, axis in zip(operands, axes, strict=True):
            if axis is not None:
                shape = operand.shape
                split = (*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
                operand = jax.lax.reshape(operand, split, out_sharding=_split_sharding(operand, axis))
            parts.append(operand)
        return jax.vmap(lambda *xs: graph.run(*xs)[0], in_axes=axes)(*parts)

    jaxpr = jax.make_jaxpr(run)(*(struct_of(v.aval) for v in inputs))
    captured = [Constant(c, jax.typeof(c)) for c in getattr(jaxpr, "consts", ())]
    partial, _ = from_jaxpr(jaxpr, [*captured, *inputs], transposed=True)
    last = chain.equations[-1]
    equations = [replace(e, source=last.source) for e in partial.equations]
    result = partial.outputs[0]
    if not isinstance(result, Value):
        raise TypeError("a gradient over the batch turned out constant")
    return equations, result


def _split_sharding(operand: Any, axis: int) -> NamedSharding | None:
    """On an Explicit mesh a split dimension needs to be told where its sharding goes: to the major part."""
    sharding = struct_of(jax.typeof(operand)).sharding
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: axis + 1], None, *sharding.spec[axis + 1 :]))


def _ordered(body: Graph, outputs: Sequence[Atom], added: Sequence[Equation]) -> Graph:
    """Insert equations as early as their operands allow: program order carries meaning for the labels."""
    defined_at = {v: i for i, e in enumerate(body.equations) for v in e.outputs}
    slots: dict[int, list[Equation]] = {}
    for equation in added:
        position = max((defined_at.get(a, -1) for a in equation.inputs if isinstance(a, Value)), default=-1)
        slots.setdefault(position, []).append(equation)
        defined_at.update(dict.fromkeys(equation.outputs, position))
    equations = list(slots.get(-1, []))
    for index, equation in enumerate(body.equations):
        equations.append(equation)
        equations.extend(slots.get(index, []))
    return Graph(body.inputs, tuple(outputs), tuple(equations))
