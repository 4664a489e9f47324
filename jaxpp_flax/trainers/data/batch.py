"""Check batches, cut them into microbatches, and count their examples.

A leaf is an array of examples, of shape (batch, ...), or a scalar: a constant of the step, equal in each microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches, StackedMicrobatches
from jaxpp_flax.trainers.data.batch_leaves import check_leaf, leaf_name, leaves_of
from jaxpp_flax.trainers.errors import BatchError


def first_examples(batch: Any) -> tuple[Any, Any]:
    """Return the path and the leaf of the first array of examples; raise a `BatchError` if there is none."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    for path, leaf in leaves:
        if np.shape(leaf):
            return path, leaf
    only = f"the batch holds nothing but the scalar {leaf_name(leaves[0][0])}" if leaves else "the batch is empty"
    raise BatchError(f"{only}. At least one leaf needs the axis of examples first: (batch, ...).")


def batch_size(batch: Any) -> int:
    """Return the common size of the leaves of `batch` along their first axis; scalars do not count.

    Example:
      >>> batch_size({"x": np.zeros((6, 3)), "y": np.zeros(6)})
      6
    """
    return _checked(batch)[2]


def _checked(batch: Any) -> tuple[list[Any], Any, int]:
    """Return the leaves of a batch, its structure and its size, once each leaf is one that a step takes."""
    named, tree = leaves_of(batch)
    if not named:
        raise BatchError(f"the batch holds no array: {batch!r}. Give a pytree of arrays of shape (batch, ...).")
    size: int | None = None
    for path, leaf in named:
        check_leaf(path, leaf)
        if shape := np.shape(leaf):
            size = shape[0] if size is None else size
            if shape[0] != size:
                _refuse_sizes(named)
    if size is None:
        first_examples(batch)
        raise AssertionError("a batch of scalars is refused")
    return [leaf for _, leaf in named], tree, size


def _refuse_sizes(named: Sequence[tuple[Any, Any]]) -> None:
    listing = ", ".join(f"{leaf_name(path)}: {leaf.shape[0]}" for path, leaf in named if np.shape(leaf))
    raise BatchError(
        f"the leaves of the batch have different leading sizes ({listing}). "
        "The first axis of each leaf counts the examples: give every leaf the same size there."
    )


def split_batch(
    batch: Any,
    num_microbatches: int,
    shards: int = 1,
    cut: Callable[[Any, int, int], Any] | None = None,
) -> Any:
    """Reshape each leaf from (batch, ...) to (num_microbatches, batch // num_microbatches, ...), in one walk.

    A scalar gets the shape (num_microbatches,): the same value for each microbatch. `shards` is the number of devices
    in a stage that divide the examples of one microbatch. `cut` is `cut_leaf`, or takes its place.

    Example:
      >>> split_batch(np.zeros((6, 3)), 2).shape
      (2, 3, 3)
    """
    leaves, tree, size = _checked(batch)
    if size % num_microbatches or size == 0:
        path, leaf = first_examples(batch)
        lower = size - size % num_microbatches
        fits = " or ".join(str(n) for n in (lower, lower + num_microbatches) if n)
        raise BatchError(
            f"a batch of {size} examples cannot be cut into num_microbatches={num_microbatches} equal parts "
            f"({leaf_name(path)} has shape {tuple(leaf.shape)}). Use a batch of {fits}, or a "
            "num_microbatches that divides the batch."
        )
    each = size // num_microbatches
    if each % shards:
        raise BatchError(
            f"a microbatch of {each} examples ({size} in num_microbatches={num_microbatches} parts) cannot be shared "
            f"evenly by the {shards} data-parallel devices of a stage. Make the batch a multiple of "
            f"{num_microbatches * shards}, use fewer microbatches, or give each stage devices that divide {each}: "
            f"mesh={{'data': {math.gcd(each, shards)}}}."
        )
    cut = cut or cut_leaf
    return jax.tree.unflatten(tree, [cut(leaf, num_microbatches, each) for leaf in leaves])


def cut_leaf(leaf: Any, count: int, each: int) -> Any:
    """Return a leaf in the step's form: `count` microbatches of `each` examples, or as many equal scalars."""
    if not np.shape(leaf):
        return repeated(leaf, count)
    shape = (count, each, *leaf.shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):  # this process does not read the leaf
        return jax.ShapeDtypeStruct(shape, dtype_of(leaf))
    return (leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)).reshape(shape)


def repeated(scalar: Any, count: int) -> Any:
    """Return a scalar of a batch in the step's form, of shape (count,): the same value for each microbatch."""
    if isinstance(scalar, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((count,), dtype_of(scalar))
    if isinstance(scalar, jax.Array):
        return jnp.broadcast_to(scalar, (count,))
    return np.full(count, scalar, dtype_of(scalar))


@dataclass(frozen=True, kw_only=True)
class InferencePart:
    """Examples that are computed together without a backward."""

    microbatches: Any  # leaves of shape (num_microbatches, microbatch, ...)
    num_microbatches: int
    num_examples: int
    is_shared: bool = True  # the data-parallel devices of a stage divide each microbatch; else each computes all of it
    shares: Any = None  # of each microbatch, how much it counts; None: 1


def split_for_inference(
    batch: Any,
    num_microbatches: int,
    shards: int = 1,
    *,
    together: bool = False,
    cut: Callable[[Any, int, int], Any] | None = None,
) -> list[InferencePart]:
    """Cut a batch of any size into at most `num_microbatches` parts that the shards divide, and the remaining examples.

    The remaining examples are fewer than the shards. They are not padded, since padding would change a mean. With
    `together`, none remain: if the shards cannot divide the batch, each of them computes all of it.

    Example:
      >>> [part.microbatches.shape for part in split_for_inference(np.zeros((6, 3)), 4)]
      [(3, 2, 3)]
      >>> [part.microbatches.shape for part in split_for_inference(np.zeros((7, 3)), 4, shards=2)]
      [(3, 2, 3), (1, 1, 3)]
    """
    size = batch_size(batch)
    if size == 0:
        raise BatchError(f"the batch has no examples: {describe_batch(batch)}. Leave it out.")
    shared = 0 if together and size % shards else size - size % shards
    parts: list[InferencePart] = []
    if shared:
        fits = (n for n in range(min(num_microbatches, shared), 0, -1) if shared % n == 0 and shared // n % shards == 0)
        count = next(fits)
        split = split_batch(_rows(batch, 0, shared), count, shards, cut)
        parts.append(InferencePart(microbatches=split, num_microbatches=count, num_examples=shared))
    if size > shared:
        left = split_batch(_rows(batch, shared, size), 1, cut=cut)
        parts.append(InferencePart(microbatches=left, num_microbatches=1, num_examples=size - shared, is_shared=False))
    return parts


def _rows(batch: Any, begin: int, end: int) -> Any:
    def one(leaf: Any) -> Any:
        if not np.shape(leaf) or (begin, end) == (0, leaf.shape[0]):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((end - begin, *leaf.shape[1:]), dtype_of(leaf))
        return leaf[begin:end]

    return jax.tree.map(one, batch)


def join_parts(outputs: Sequence[Any]) -> Any:
    """Invert `split_for_inference`, on the host: each leaf becomes one `jax.Array` of shape (batch, ...).

    Leaves of shape (num_microbatches,) keep one value for each microbatch.
    """

    def join(*leaves: Any) -> jax.Array:
        arrays = [np.asarray(leaf) for leaf in jax.device_get(leaves)]
        return jax.device_put(np.concatenate([a if a.ndim < 2 else a.reshape(-1, *a.shape[2:]) for a in arrays]))

    return jax.tree.map(join, *outputs)


def describe_batch(batch: Any) -> str:
    """Return the types and shapes of a batch's leaves, for messages; of `Microbatches`, those of each shape.

    Example:
      >>> describe_batch({"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.int32)})
      "['x'] float32[4, 3], ['y'] int32[4]"
    """
    if isinstance(batch, Microbatches | StackedMicrobatches):
        return "; ".join(dict.fromkeys(map(describe_batch, batch.items)))
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return ", ".join(f"{jax.tree_util.keystr(path)} {dtype_of(x)}{list(np.shape(x))}".strip() for path, x in leaves)


def signature(batch: Any) -> tuple[Any, ...]:
    """Return the structure, shapes and dtypes: batches with equal signatures run on one compiled step."""
    leaves, tree = jax.tree.flatten(batch)
    return (tree, *((np.shape(leaf), dtype_of(leaf)) for leaf in leaves))


def dtype_of(leaf: Any) -> Any:
    """Return the dtype that JAX gives `leaf`, or a shape: float64 becomes float32, unless 64 bits are enabled."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = np.asarray(leaf).dtype
    if isinstance(leaf, jax.Array) or not isinstance(dtype, np.dtype):  # PRNG keys have a dtype of JAX
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of `leaf`, and the dtype that JAX gives it."""
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype_of(leaf))


def resized(batch: Any, size: int) -> Any:
    """Return the shapes of a batch of so many examples, or of a microbatch; scalars are constants."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else shape_of(leaf)
        return shape.update(shape=(size, *shape.shape[1:])) if shape.shape else shape

    return jax.tree.map(one, batch)


def examples_in_all(batch: Any) -> int:
    """Return the number of examples of a batch; of `Microbatches`, those of all of them.

    Example:
      >>> examples_in_all(Microbatches([np.zeros((2, 4)), np.zeros((6, 1))]))
      8
    """
    items = batch if isinstance(batch, Microbatches) else [batch]
    return sum(first_examples(item)[1].shape[0] for item in items)


def count_units(batch: Any, global_batch_size: int | None = None) -> tuple[int, str]:
    """Count units for the progress: the tokens of the first integer leaf with two axes, or else examples.

    `global_batch_size` is the number of examples of the whole batch, if `batch` has only this process's rows.

    Example:
      >>> count_units({"tokens": np.zeros((4, 8), np.int32)}), count_units(np.zeros((4, 8)))
      ((32, 'tokens'), (4, 'examples'))
    """
    if isinstance(batch, Microbatches):
        counts, units = zip(*map(count_units, batch), strict=True)
        size = examples_in_all(batch)
        return sum(counts) * (global_batch_size or size) // size, units[0]
    for leaf in jax.tree.leaves(batch):
        if len(np.shape(leaf)) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return (global_batch_size or leaf.shape[0]) * leaf.shape[1], "tokens"
    return global_batch_size or first_examples(batch)[1].shape[0], "examples"
