"""The operations that reduce the results of a loop's microbatches: sum, maximum, stack, last, or one's own."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["Add", "AddOp", "Concat", "Last", "LastOp", "Max", "MaxOp", "Op"]


@runtime_checkable
class Op(Protocol):
    """The interface of operations: each reduces one result of the loop's body over the microbatches.

    For your own reduction, write a class with these two methods, which JAX traces. It must be hashable.
    """

    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        """Return the accumulator before the first microbatch; `value` has the shape and dtype of one result."""
        ...

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        """Return the accumulator after microbatch `index` (int32 scalar); same shape and dtype as `state`."""
        ...


def _full(value: jax.ShapeDtypeStruct, fill: Any, axis: int | None = None, size: int = 0) -> jax.Array:
    """Return an array of one number like `value`, with a new axis if given; sharded alike on an Explicit mesh."""
    shape, sharding = value.shape, value.sharding
    entries = list(sharding.spec.partitions) if sharding is not None else []
    if axis is not None:
        shape = (*shape[:axis], size, *shape[axis:])
        entries.insert(axis, None)  # a spec that ends before the axis does not shard it
    if sharding is None:
        return jnp.full(shape, fill, value.dtype)
    array = jax.lax.full(shape, fill, value.dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec(*entries)))
    if not sharding.spec.unreduced:
        return array
    # `value` is a partial sum on each device; zeros are a valid partial sum.
    spec = PartitionSpec(*entries, unreduced=sharding.spec.unreduced)
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))


def _lowest(dtype: Any) -> Any:
    """Return a number of a type that no other number of the type is below; some small floats have no infinity."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(-np.inf, -np.inf)  # complex numbers are compared by their real parts first
    if jnp.issubdtype(dtype, jnp.floating):
        has_infinity = bool(np.isneginf(np.asarray(-np.inf).astype(dtype).astype(np.float32)))
        return -np.inf if has_infinity else float(jnp.finfo(dtype).min)
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


@dataclass(frozen=True)
class AddOp:
    """Sum over the microbatches (`Add` is its instance)."""

    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return _full(value, 0)

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return state + value


@dataclass(frozen=True)
class MaxOp:
    """Element-wise maximum over the microbatches (`Max` is its instance)."""

    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return _full(value, _lowest(value.dtype))

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.maximum(state, value)


@dataclass(frozen=True)
class Concat:
    """Stack the results along a new axis at position `axis`, in the order of the microbatches.

    As in `jnp.stack`, a negative axis counts from the end of the stacked result.
    """

    axis: int = 0

    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return _full(value, 0, self.position(len(value.shape)), num_microbatches)

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(state, value, index, self.position(value.ndim))

    def position(self, ndim: int) -> int:
        """Return the new axis, counted from the front, for results of `ndim` dimensions.

        Raises:
          TypeError: if the axis is no whole number.
          ValueError: if the stacked result has no such axis.

        Example:
          >>> Concat(-1).position(ndim=2)
          2
        """
        try:
            axis = operator.index(self.axis)
        except TypeError as error:
            raise TypeError(f"Concat({self.axis!r}): the axis must be a whole number, e.g. `Concat(0)`.") from error
        if not -ndim <= axis + 1 <= ndim + 1:
            raise ValueError(
                f"Concat({axis}) stacks results of {ndim} dimensions along a new axis, and axis {axis} is out of "
                f"range. Give an axis from {-ndim - 1} to {ndim}."
            )
        return axis % (ndim + 1)


@dataclass(frozen=True)
class LastOp:
    """Return the result of the last microbatch (`Last` is its instance)."""

    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return _full(value, 0)  # every microbatch overwrites it

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return value


Add = AddOp()
Max = MaxOp()
Last = LastOp()
