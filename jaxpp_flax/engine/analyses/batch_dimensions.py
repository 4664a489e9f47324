"""Follow the data-parallel dimension through a graph: the dimension of each value that runs over the sharded examples.

This is a small forward analysis: a rule for each primitive gives the dimension of its results from the dimension of its
operands. A primitive without a rule loses the dimension. This is always safe: the analysis only enables an
optimisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.inner_bodies import Scan, open_scan
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Equation, Value
from jaxpp_flax.engine.tracing.primitives import Batch, Facts, facts_of

__all__ = ["BatchDim", "ShardCounts", "inside_scan", "propagate"]

# The dimension, and the mesh axes (as in a PartitionSpec entry) over which it is sharded.
BatchDim = tuple[int, Any]


@dataclass(frozen=True)
class ShardCounts:
    """The number of shards over an entry of a PartitionSpec.

    Example:
      >>> shards = ShardCounts({"data": 4, "tensor": 2, "expert": 1})
      >>> shards("data"), shards(("data", "tensor")), shards.batch_dim(PartitionSpec("expert", ("data", "expert")))
      (4, 8, (1, 'data'))
    """

    axes: Mapping[str, int]

    def __call__(self, entry: Any) -> int:
        """Return the product of the sizes of the entry's axes."""
        return math.prod(self.axes[name] for name in axes_in((entry,)))

    def batch_dim(self, spec: PartitionSpec) -> BatchDim | None:
        """Return the first dimension of an argument that is really sharded, with the axes that shard it."""
        return next(
            ((dim, self._axes_of(e)) for dim, e in enumerate(spec.partitions) if e is not None and self(e) > 1), None
        )

    def _axes_of(self, entry: Any) -> Any:
        """Return an entry without axes of size 1."""
        names = tuple(name for name in axes_in((entry,)) if self.axes[name] > 1)
        return names[0] if len(names) == 1 else names


def propagate(
    equations: Iterable[Equation], known: Mapping[Value, BatchDim], size: Callable[[Any], int]
) -> dict[Value, BatchDim]:
    """Return the batch dimension of every value that has one.

    Args:
      equations: in executable order, with plain calls inlined.
      known: the batch dimensions of the graph's inputs.
      size: returns the number of shards over given mesh axes.
    """
    dims = dict(known)
    for equation in equations:
        tagged = [(i, dims[a]) for i, a in enumerate(equation.inputs) if isinstance(a, Value) and a in dims]
        if not tagged:
            continue
        axes = tagged[0][1][1]
        if any(tag[1] != axes for _, tag in tagged):
            continue
        at = {i: tag[0] for i, tag in tagged}
        batch = facts_of(equation.primitive).batch
        if batch is Batch.SCAN:
            found = _scan(equation, at, axes, size)
        elif batch is Batch.SHARD_MAP:
            found = _shard_map(equation, at, axes, size)
        else:
            found = _rule(equation, at, axes)
        for position, value in enumerate(equation.outputs):
            dim = found.get(position)
            if dim is not None and (held := _held_by(value.aval.shape[dim], axes, size)) is not None:
                dims[value] = (int(dim), held)
    return dims


def _held_by(length: int, axes: Any, size: Callable[[Any], int]) -> Any:
    """Return the mesh axes that a dimension holds: the first ones, if a reshape has left it only the major part."""
    if length % size(axes) == 0:
        return axes
    names = axes_in((axes,))
    for count in range(len(names) - 1, 0, -1):
        major: Any = tuple(names[:count]) if count > 1 else names[0]
        if length % size(major) == 0:
            return major
    return None


def inside_scan(scan: Scan, at: Mapping[int, BatchDim], size: Callable[[Any], int]) -> dict[Value, BatchDim]:
    """Return the batch dimensions of the values in a scan's body; `at` gives those of the scan's operands.

    A carry has a batch dimension if it enters and leaves the body with the same one; its initial value (often zeros)
    need not have one.
    """
    sliced = scan.num_consts + scan.num_carry
    known = {scan.body.inputs[i]: (dim - (i >= sliced), axes) for i, (dim, axes) in at.items() if i < sliced or dim > 0}
    given_up: set[Value] = set()
    while True:
        dims = propagate(scan.body.equations, known, size)
        changed = False
        for before, after in zip(scan.carry_in, scan.body.outputs, strict=False):
            found = dims.get(after) if isinstance(after, Value) else None
            if before in given_up or known.get(before) == found:
                continue
            changed = True
            if found is None or before in known:
                known.pop(before, None)
                given_up.add(before)
            else:
                known[before] = found
        if not changed:
            return {v: dim for v, dim in dims.items() if v not in given_up}


def _scan(equation: Equation, at: dict[int, int], axes: Any, size: Callable[[Any], int]) -> dict[int, int]:
    scan = open_scan(equation)
    dims = inside_scan(scan, {i: (dim, axes) for i, dim in at.items()}, size)
    found: dict[int, int] = {}
    for position, atom in enumerate(scan.body.outputs):
        carried = position < scan.num_carry
        value = scan.carry_in[position] if carried else atom
        if isinstance(value, Value) and value in dims:
            found[position] = dims[value][0] + (not carried)
    return found


def _shard_map(equation: Equation, at: dict[int, int], axes: Any, size: Callable[[Any], int]) -> dict[int, int]:
    """Return the dimensions of a shard_map's results: its specs give them for manual axes, its body for others."""
    params = equation.params
    names = axes_in((axes,))
    if not any(name in params["newly_manual_axes"] for name in names):
        body = body_of(equation)
        dims = propagate(body.equations, {body.inputs[i]: (dim, axes) for i, dim in at.items()}, size)
        return {k: dims[v][0] for k, v in enumerate(body.outputs) if isinstance(v, Value) and v in dims}

    def partitioned(entry: Any) -> list[str]:
        return [name for name in axes_in((entry,)) if size(name) > 1]

    specs = [list(map(partitioned, spec.partitions)) for spec in params["out_specs"]]
    return {k: entries.index(names) for k, entries in enumerate(specs) if names in entries}


def _rule(equation: Equation, at: dict[int, int], axes: Any) -> dict[int, int]:
    """Return the batch dimension of each output that has one; `at` gives the inputs' dimensions over `axes`."""
    facts, params = facts_of(equation.primitive), equation.params
    shapes = [tuple(a.aval.shape) for a in equation.inputs]
    out = tuple(equation.outputs[0].aval.shape) if equation.outputs else ()
    if facts.batch is Batch.EACH:
        return dict(at)
    if facts.batch is Batch.ELEMENTWISE:
        same = {d for i, d in at.items() if len(shapes[i]) == len(out) and shapes[i][d] == out[d]}
        return {0: same.pop()} if len(same) == 1 else {}
    if facts.batch is Batch.CONCATENATE:
        same = set(at.values())
        return {0: next(iter(same))} if len(same) == 1 and params["dimension"] not in same else {}
    if facts.batch is Batch.DOT:
        return _dot(params["dimension_numbers"], at, shapes)
    if facts.batch is Batch.GATHER:
        return _gather(params["dimension_numbers"], at, shapes, out)
    if facts.batch is Batch.SCATTER and 0 not in at:
        return _scatter(params["dimension_numbers"], at, shapes)
    dim = at.get(0)
    return {} if dim is None else _of_first(equation, facts, dim, set(at) == {0}, axes)


def _of_first(equation: Equation, facts: Facts, dim: int, alone: bool, axes: Any) -> dict[int, int]:
    """Return the batch dimension of each output; `dim` is that of the first operand, which may be `alone` in that."""
    params, shape = equation.params, tuple(equation.inputs[0].aval.shape)
    out = tuple(equation.outputs[0].aval.shape)
    dropped = facts.dimensions_in(params)
    match facts.batch:
        case Batch.BROADCAST:
            target = params["broadcast_dimensions"][dim]
            return {0: target} if out[target] == shape[dim] else {}
        case Batch.TRANSPOSE:
            return {0: tuple(params["permutation"]).index(dim)}
        case Batch.RESHAPE:
            return _reshape(shape, out, dim)
        case Batch.PLACED:
            return {0: dim} if _leaves_to(axes, facts.placing_in(params), params, dim) else {}
        case Batch.REDUCED:
            return {} if dim in dropped else {0: dim - sum(d < dim for d in dropped)}
        case Batch.ALONG:
            return {} if dim in dropped else dict.fromkeys(range(len(equation.outputs)), dim)
        case Batch.SLICED:
            return {0: dim} if out[dim] == shape[dim] else {}
        case Batch.CONVOLUTION:
            numbers = params["dimension_numbers"]
            return {0: numbers.out_spec[0]} if alone and dim == numbers.lhs_spec[0] else {}
        case _:
            return {}


def _dot(numbers: Any, at: dict[int, int], shapes: list[tuple[int, ...]]) -> dict[int, int]:
    (lc, rc), (lb, rb) = numbers
    batch, left_contract, right_contract = (tuple(lb), tuple(rb)), tuple(lc), tuple(rc)
    left_free = [d for d in range(len(shapes[0])) if d not in (*left_contract, *batch[0])]
    right_free = [d for d in range(len(shapes[1])) if d not in (*right_contract, *batch[1])]
    found: set[int] = set()
    for side, dim in at.items():
        if dim in batch[side]:
            found.add(batch[side].index(dim))
        elif side == 0 and dim in left_free:
            found.add(len(batch[0]) + left_free.index(dim))
        elif side == 1 and dim in right_free:
            found.add(len(batch[0]) + len(left_free) + right_free.index(dim))
        else:
            return {}  # contracted: this is a sum over the examples
    return {0: found.pop()} if len(found) == 1 else {}


def _leaves_to(axes: Any, sharding: Any, params: Mapping[str, Any], dim: int) -> bool:
    """Return whether a constraint leaves a dimension to the axes of the batch, or to the compiler."""
    if not isinstance(sharding, NamedSharding):
        return False
    if sharding.mesh.empty or dim in params.get("unconstrained_dims", ()):
        return True
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    return entry is PartitionSpec.UNCONSTRAINED or set(axes_in((axes,))) <= set(axes_in((entry,)))


def _gather(
    numbers: Any, at: dict[int, int], shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]
) -> dict[int, int]:
    batch = [d for d in range(len(out)) if d not in numbers.offset_dims]
    if set(at) == {1}:
        return {} if at[1] == len(shapes[1]) - 1 else {0: batch[at[1]]}
    pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if at[0] in pairs:
        return {0: batch[pairs[at[0]]]} if at.get(1, pairs[at[0]]) == pairs[at[0]] else {}
    windows = [d for d in range(len(shapes[0])) if d not in (*pairs, *numbers.collapsed_slice_dims)]
    if 1 in at or at[0] not in windows:
        return {}
    target = numbers.offset_dims[windows.index(at[0])]
    return {0: target} if out[target] == shapes[0][at[0]] else {}


def _scatter(numbers: Any, at: dict[int, int], shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Return the batch dimension of a scatter into an array that has none, such as the zeros of a gradient."""
    pairs = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    if 1 in at:
        free = [d for d in range(len(shapes[2])) if d not in numbers.update_window_dims]
        return {0: pairs[at[1]]} if at[1] in pairs and at.get(2, free[at[1]]) == free[at[1]] else {}
    windows = [d for d in range(len(shapes[0])) if d not in (*pairs.values(), *numbers.inserted_window_dims)]
    if at[2] not in numbers.update_window_dims:
        return {}
    target = windows[numbers.update_window_dims.index(at[2])]
    return {0: target} if shapes[2][at[2]] == shapes[0][target] else {}


def _reshape(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> dict[int, int]:
    """Find the dimension after a reshape: the dimensions before it must keep their total size."""
    ahead = math.prod(before[:dim])
    for target in range(len(after)):
        if math.prod(after[:target]) == ahead and (after[target] > 1 or before[dim] == 1):
            longer, shorter = max(after[target], before[dim]), min(after[target], before[dim])
            return {0: target} if longer % shorter == 0 else {}
    return {}
