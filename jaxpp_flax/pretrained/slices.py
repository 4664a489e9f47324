"""The part of a tensor that a part of a leaf needs, and the arrangement of its values, in both directions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxpp_flax.pretrained.name_map import Rule

Runs: TypeAlias = tuple[tuple[slice, ...], ...]
"""For each dimension of a tensor, the runs of neighbouring positions."""
Index: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True)
class TensorPart:
    """The part of one tensor that a part of a leaf consists of."""

    number: int  # of the tensor among the leaf's tensors
    runs: Runs  # the positions in the tensor
    place: tuple[Any, ...]  # where its values lie in the part of the leaf
    split: tuple[int, ...]  # the shape of its values before the rule's `transpose`


def full_index(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Return the index with start and stop for each dimension.

    Example:
      >>> full_index((slice(None), slice(2, 4)), (3, 8))
      (slice(0, 3, 1), slice(2, 4, 1))
    """
    return tuple(slice(*of.indices(size)) for of, size in zip(index, shape, strict=True))


def tensor_parts(rule: Rule, leaf_shape: Sequence[int], index: Sequence[slice]) -> Iterator[TensorPart]:
    """Yield the parts of tensors that `leaf[index]` consists of: one, or one for each layer of a stack.

    Example:
      >>> rule = Rule("q", "q.weight", merge=(2, 1), transpose=(2, 0, 1))  # (4 * 16, 64) to (64, 4, 16)
      >>> (part,) = tensor_parts(rule, (64, 4, 16), (slice(0, 64), slice(2, 4), slice(0, 16)))
      >>> part.runs
      ((slice(32, 64, None),), (slice(0, 64, None),))
    """
    index = full_index(index, leaf_shape)
    inner = [of for dim, of in enumerate(index) if dim != rule.stack]
    split_shape = rule.split_shape(leaf_shape)
    split_index = list(inner)
    for dim, of in enumerate(rule.transpose or ()):
        split_index[of] = inner[dim]
    runs: list[tuple[slice, ...]] = []
    end = 0
    for count in rule.merge or (1,) * len(split_shape):
        runs.append(_runs(split_shape[end : end + count], split_index[end : end + count]))
        end += count
    split = tuple(of.stop - of.start for of in split_index)
    if rule.stack is None:
        yield TensorPart(0, tuple(runs), (), split)
        return
    for place, layer in enumerate(range(index[rule.stack].start, index[rule.stack].stop)):
        yield TensorPart(layer, tuple(runs), (slice(None),) * rule.stack + (place,), split)


def _runs(shape: Sequence[int], index: Sequence[slice]) -> tuple[slice, ...]:
    """Return the runs of positions of `index` in the flattened array of this shape."""
    if not shape:
        return (slice(0, 1),)
    if any(of.start >= of.stop for of in index):
        return ()
    inner = math.prod(shape[1:])
    if all(of == slice(0, size, 1) for of, size in zip(index[1:], shape[1:], strict=True)):
        return (slice(index[0].start * inner, index[0].stop * inner),)
    below = _runs(shape[1:], index[1:])
    return tuple(
        slice(row * inner + run.start, row * inner + run.stop)
        for row in range(index[0].start, index[0].stop)
        for run in below
    )


def to_leaf(rule: Rule, part: TensorPart, values: np.ndarray) -> np.ndarray:
    """Arrange the values of a part of a tensor as in the leaf.

    Example:
      >>> rule = Rule("kernel", "weight", transpose=(1, 0))
      >>> (part,) = tensor_parts(rule, (2, 3), (slice(None), slice(1, 2)))
      >>> part.runs, to_leaf(rule, part, np.array([[7, 8]])).tolist()
      (((slice(1, 2, None),), (slice(0, 2, None),)), [[7], [8]])
    """
    values = values.reshape(part.split)
    return values if rule.transpose is None else values.transpose(rule.transpose)


def to_tensor(rule: Rule, part: TensorPart, piece: np.ndarray) -> np.ndarray:
    """Arrange a part of a leaf as in the tensor, in C order: the inverse of `to_leaf`.

    Example:
      >>> rule = Rule("kernel", "weight", transpose=(1, 0))
      >>> (part,) = tensor_parts(rule, (2, 3), (slice(None), slice(1, 2)))
      >>> to_tensor(rule, part, np.array([[7], [8]])).tolist()
      [[7, 8]]
    """
    piece = piece[part.place]
    if rule.transpose is not None:
        piece = piece.transpose(np.argsort(rule.transpose))
    shape = [sum(run.stop - run.start for run in runs) for runs in part.runs]
    return np.ascontiguousarray(piece).reshape(shape)
