"""Tensors on disk, and the part of a tensor that a part of a leaf needs, in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxpp_flax.pretrained.name_map import Rule

Index: TypeAlias = tuple[slice, ...]
"""A slice with start and stop for each dimension."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor on disk: its type is known, its values are read in parts. `dtype` None: they cannot be read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    file: Path
    read_values: Callable[[Index], np.ndarray]

    def read(self, index: Index) -> np.ndarray:
        """Read a part, and nothing else."""
        shape = [of.stop - of.start for of in index]
        return self.read_values(index) if all(shape) else np.empty(shape, self.dtype)


@dataclass(frozen=True)
class TensorPart:
    """The part of one tensor that a part of a leaf consists of."""

    number: int  # of the tensor among the leaf's tensors
    place: tuple[Any, ...]  # where its values lie in the part of the leaf
    index: Index  # in the tensor, with its dimensions split as in `Rule.before_transpose`


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
      >>> part.index
      (slice(2, 4, 1), slice(0, 16, 1), slice(0, 64, 1))
    """
    index = full_index(index, leaf_shape)
    split = rule.before_transpose(index)
    if rule.stack is None:
        yield TensorPart(0, (), split)
        return
    for place, layer in enumerate(range(index[rule.stack].start, index[rule.stack].stop)):
        yield TensorPart(layer, (slice(None),) * rule.stack + (place,), split)


def read_part(rule: Rule, leaf_shape: Sequence[int], part: TensorPart, tensor: StoredTensor) -> np.ndarray:
    """Read a part of a tensor, arranged as in the leaf.

    Of dimensions that are one of the tensor's, the first one's positions are read, with all of the other ones.
    """
    groups = rule.grouped(rule.before_transpose(leaf_shape))
    stored, shape, cut = list[slice](), list[int](), list[slice]()
    for sizes, wanted in zip(groups, rule.grouped(part.index), strict=True):
        if not sizes:
            stored.append(slice(0, 1))
            continue
        rest = math.prod(sizes[1:])
        stored.append(slice(wanted[0].start * rest, wanted[0].stop * rest))
        shape += [wanted[0].stop - wanted[0].start, *sizes[1:]]
        cut += [slice(None), *wanted[1:]]
    values = tensor.read(tuple(stored)).reshape(shape)[tuple(cut)]
    return values if rule.transpose is None else values.transpose(rule.transpose)


def to_tensor(rule: Rule, part: TensorPart, piece: np.ndarray) -> np.ndarray:
    """Arrange a part of a leaf as in the tensor, whose dimensions are split.

    Example:
      >>> rule = Rule("kernel", "weight", transpose=(1, 0))
      >>> (part,) = tensor_parts(rule, (2, 3), (slice(None), slice(1, 2)))
      >>> part.index, to_tensor(rule, part, np.array([[7], [8]])).tolist()
      ((slice(1, 2, 1), slice(0, 2, 1)), [[7, 8]])
    """
    piece = piece[part.place]
    return piece if rule.transpose is None else piece.transpose(np.argsort(rule.transpose))
