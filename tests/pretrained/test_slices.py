"""A part of a leaf and the parts of its tensors, against the whole in NumPy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.pretrained import Rule
from jaxpp_flax.pretrained.slices import StoredTensor, read_part, tensor_parts, to_tensor


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rule, tuple[int, ...], tuple[slice, ...]]:
    """A rule, the shape of its leaf, and a part of the leaf."""
    ndim = draw(st.integers(0, 3))
    transpose = tuple(draw(st.permutations(range(ndim)))) if draw(st.booleans()) else None
    merge: tuple[int, ...] | None = None
    if draw(st.booleans()):
        merge, left = (), ndim
        while left:
            merge += (draw(st.integers(0 if len(merge) < 4 else 1, left)),)
            left -= merge[-1]
    stack = draw(st.sampled_from([None, *range(ndim + 1)]))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(ndim + (stack is not None)))
    index = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    rule = Rule("leaf", "tensor" if stack is None else "tensor.#", transpose, merge, stack)
    return rule, shape, tuple(slice(*of) for of in index)


def tensors_of(rule: Rule, leaf: np.ndarray) -> list[np.ndarray]:
    """What the rule says, on whole arrays."""
    layers = [leaf] if rule.stack is None else list(np.moveaxis(leaf, rule.stack, 0))
    back = None if rule.transpose is None else np.argsort(rule.transpose)
    return [
        (layer if back is None else layer.transpose(back)).reshape(rule.tensor_shape(leaf.shape)) for layer in layers
    ]


def stored(tensor: np.ndarray) -> StoredTensor:
    file = Path("x")
    return StoredTensor(name="x", shape=tensor.shape, dtype=tensor.dtype, file=file, read_values=tensor.__getitem__)


@given(cases())
def test_a_part_is_that_of_the_whole_in_both_directions(case: tuple[Rule, tuple[int, ...], tuple[slice, ...]]):
    rule, shape, index = case
    leaf = np.arange(math.prod(shape)).reshape(shape)
    tensors = tensors_of(rule, leaf)
    written = [np.full_like(tensor, -1) for tensor in tensors]
    read = np.full_like(leaf[index], -1)
    for part in tensor_parts(rule, shape, index):
        read[part.place] = read_part(rule, shape, part, stored(tensors[part.number]))
        block = to_tensor(rule, part, leaf[index])
        written[part.number].reshape(rule.before_transpose(shape))[part.index] = block  # a view
    np.testing.assert_array_equal(read, leaf[index])
    # Exactly the values of this part are written, each to its place.
    marked = np.full_like(leaf, -1)
    marked[index] = leaf[index]
    for tensor, expected in zip(written, tensors_of(rule, marked), strict=True):
        np.testing.assert_array_equal(tensor, expected)
