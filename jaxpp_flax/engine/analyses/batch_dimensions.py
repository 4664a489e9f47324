"""Where the dimensions of an equation's operands go: to a dimension of its results, into a sum, or to no known place.

`tracing/primitives.py` says which rule holds for a primitive. A dimension of an operation without a rule is lost. This
is always safe: what is known of dimensions only enables an optimisation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in, entry_of
from jaxpp_flax.engine.tracing.ir import Equation, Value
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of

__all__ = ["BatchDim", "ShardCounts", "Way", "ways_of"]

# A dimension that runs over the sharded examples, and the mesh axes (as in a PartitionSpec entry) that shard it.
BatchDim = tuple[int, Any]
# For each dimension of an operand: the dimension of the results that it becomes; or a negative number, if it is summed
# together with the dimensions of the same number; or None, if it is lost.
Way = Sequence[int | None]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardCounts:
    """The number of shards over an entry of a PartitionSpec, and what this tells of a whole spec.

    Example:
      >>> shards = ShardCounts({"data": 4, "tensor": 2, "expert": 1})
      >>> shards.parts(PartitionSpec("tensor", None, ("data", "expert")))
      8
      >>> shards("data"), shards(("data", "tensor")), shards.batch_dim(PartitionSpec("expert", ("data", "expert")))
      (4, 8, (1, 'data'))
    """

    axes: Mapping[str, int]

    def __call__(self, entry: Any) -> int:
        """Return the product of the sizes of the entry's axes."""
        return math.prod(self.axes[name] for name in axes_in((entry,)))

    def parts(self, spec: PartitionSpec) -> int:
        """Return the number of parts into which a spec cuts an array."""
        return math.prod(self.axes[name] for name in axes_in(spec))

    def nbytes(self, value: Value, spec: PartitionSpec) -> float:
        """Return the bytes of each device's part of a value, without the padding of layouts."""
        return value.nbytes / self.parts(spec)

    def batch_dim(self, spec: PartitionSpec) -> BatchDim | None:
        """Return the first dimension of an argument that is really sharded, with the axes that shard it."""
        return next(
            ((dim, self._axes_of(e)) for dim, e in enumerate(spec.partitions) if e is not None and self(e) > 1), None
        )

    def _axes_of(self, entry: Any) -> Any:
        """Return an entry without axes of size 1."""
        return entry_of(name for name in axes_in((entry,)) if self.axes[name] > 1)


def ways_of(equation: Equation, axes: Any) -> list[Way]:
    """Return the way of each operand; for the last ones, it may lack. `axes` shard the dimension that is followed."""
    facts, params = facts_of(equation.primitive), equation.params
    shapes = [tuple(a.aval.shape) for a in equation.inputs]
    out, along = tuple(equation.outputs[0].aval.shape), facts.dimensions_in(params)
    match facts.batch:
        case Batch.ELEMENTWISE | Batch.SLICED | Batch.ALONG:
            return [
                [d if _stays(d, shape, out) and d not in along else None for d in range(len(shape))] for shape in shapes
            ]
        case Batch.PLACED:
            return [[d if _leaves_to(axes, facts.placing_in(params), params, d) else None for d in range(len(out))]]
        case Batch.REDUCED:
            left = [d for d in range(len(shapes[0])) if d not in along]
            return [[left.index(d) if d in left else ~d if facts.summed else None for d in range(len(shapes[0]))]]
        case Batch.BROADCAST:
            return [
                [d if out[d] == n else None for d, n in zip(params["broadcast_dimensions"], shapes[0], strict=True)]
            ]
        case Batch.TRANSPOSE:
            return [[tuple(params["permutation"]).index(d) for d in range(len(out))]]
        case Batch.RESHAPE:
            return [[_reshaped(shapes[0], out, d) for d in range(len(shapes[0]))]]
        case Batch.CONVOLUTION:
            numbers = params["dimension_numbers"]
            return [[numbers.out_spec[0] if d == numbers.lhs_spec[0] else None for d in range(len(out))]]
        case Batch.DOT:
            return _dot(params["dimension_numbers"], shapes)
        case Batch.GATHER:
            return _gather(params["dimension_numbers"], shapes, out)
        case Batch.SCATTER:
            return _scatter(params["dimension_numbers"], shapes, bool(facts.summed))
        case _:
            return []


def _stays(dim: int, shape: Shape, out: Shape) -> bool:
    return len(shape) == len(out) and shape[dim] == out[dim]


def _leaves_to(axes: Any, sharding: Any, params: Mapping[str, Any], dim: int) -> bool:
    """Return whether a constraint leaves a dimension to the axes of the batch, or to the compiler."""
    if not isinstance(sharding, NamedSharding):
        return False
    if sharding.mesh.empty or dim in params.get("unconstrained_dims", ()):
        return True
    entry = sharding.spec.partitions[dim] if dim < len(sharding.spec.partitions) else None
    return entry is PartitionSpec.UNCONSTRAINED or set(axes_in((axes,))) <= set(axes_in((entry,)))


def _reshaped(before: Shape, after: Shape, dim: int) -> int | None:
    """Find the dimension after a reshape: the dimensions before it must keep their total size."""
    ahead = math.prod(before[:dim])
    for target in range(len(after)):
        if math.prod(after[:target]) == ahead and (after[target] > 1 or before[dim] == 1):
            longer, shorter = max(after[target], before[dim]), min(after[target], before[dim])
            return target if longer % shorter == 0 else None
    return None


def _dot(numbers: Any, shapes: Sequence[Shape]) -> list[Way]:
    contracted, batch = numbers
    ways: list[Way] = []
    free = len(batch[0])  # the result has the batch dimensions first, then those of each side that are left
    for shape, summed, shared in zip(shapes, contracted, batch, strict=True):
        way: list[int | None] = []
        for d in range(len(shape)):
            if d in summed:
                way.append(~tuple(summed).index(d))
            elif d in shared:
                way.append(tuple(shared).index(d))
            else:
                way.append(free)
                free += 1
        ways.append(way)
    return ways


def _gather(numbers: Any, shapes: Sequence[Shape], out: Shape) -> list[Way]:
    batch = [d for d in range(len(out)) if d not in numbers.offset_dims]
    ways = dict(
        zip(numbers.operand_batching_dims, (batch[d] for d in numbers.start_indices_batching_dims), strict=True)
    )
    windows = [d for d in range(len(shapes[0])) if d not in (*ways, *numbers.collapsed_slice_dims)]
    ways |= {d: to for d, to in zip(windows, numbers.offset_dims, strict=True) if out[to] == shapes[0][d]}
    return [[ways.get(d) for d in range(len(shapes[0]))], [*batch, None]]


def _scatter(numbers: Any, shapes: Sequence[Shape], adds: bool) -> list[Way]:
    """Return the ways into an array without a dimension of examples, such as the zeros of a gradient."""
    operand, indices, updates = shapes
    pairs = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    rows = [pairs.get(d, ~d if adds else None) for d in range(len(indices) - 1)]
    windows = [d for d in range(len(operand)) if d not in (*pairs.values(), *numbers.inserted_window_dims)]
    sizes = zip(windows, numbers.update_window_dims, strict=True)
    into = {position: d if operand[d] == updates[position] else None for d, position in sizes}
    free = iter(rows)
    return [[None] * len(operand), [*rows, None], [into[d] if d in into else next(free) for d in range(len(updates))]]
