"""Batches of an evaluation in the form of another batch's program: examples are repeated, and count by their share.

The mean of d examples is also the mean of a microbatch that holds each of them equally often. So a microbatch of size b
can stand for d examples if d divides b, and it counts by its share d / b: its loss and metrics, or their sums and
weights, are multiplied by this number. The examples that are left over by the full microbatches are cut into such
parts, the largest first: 7 examples and microbatches of 4 make parts of 4, 2 and 1. Nothing is estimated, and no term
is negative. It holds where each example counts for itself: see `LossGraph.is_separable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.trainers.data.batch import InferencePart, dtype_of, repeated

__all__ = ["Form", "form_for", "padded_parts"]

_TRIED = 64  # the most sizes of a microbatch to try


@dataclass(frozen=True)
class Form:
    """The numbers of microbatches, and of examples in each of them, that a program takes."""

    num_microbatches: int
    microbatch: int

    @property
    def size(self) -> int:
        """The number of examples in a batch that fills the program."""
        return self.num_microbatches * self.microbatch


def form_for(size: int, num_microbatches: int, shards: int = 1) -> Form:
    """Return the form that takes a batch in the least time; `shards` devices divide each microbatch.

    Example:
      >>> form_for(8, 4) == form_for(7, 4) == Form(4, 2)  # 2, 2, 2 and 1
      True
      >>> form_for(15, 4)
      Form(num_microbatches=3, microbatch=5)
    """
    first = max(1, size // (num_microbatches * shards)) * shards
    forms = list[tuple[int, int, Form]]()
    for microbatch in range(first, first + _TRIED * shards, shards):
        parts = len(_sizes(size, microbatch))
        form, runs = Form(min(parts, num_microbatches), microbatch), math.ceil(parts / num_microbatches)
        forms.append((runs * num_microbatches * microbatch, runs, form))  # few microbatches leave stages idle
    return min(forms, key=lambda of: of[:2])[2]


def padded_parts(batch: Any, size: int, form: Form) -> Iterator[InferencePart]:
    """Yield the runs of a program of this form for a batch of `size` examples; unused microbatches have no share.

    Example:
      >>> (part,) = padded_parts(np.arange(7), 7, Form(4, 4))
      >>> part.microbatches.tolist(), part.shares.tolist()
      ([[0, 1, 2, 3], [4, 5, 4, 5], [6, 6, 6, 6], [6, 6, 6, 6]], [1.0, 0.5, 0.25, 0.0])
    """
    sizes = _sizes(size, form.microbatch)
    ends = np.cumsum(sizes)
    rows = [np.resize(np.arange(end - of, end), form.microbatch) for of, end in zip(sizes, ends, strict=True)]
    for begin in range(0, len(sizes), form.num_microbatches):
        chosen, own = rows[begin : begin + form.num_microbatches], sizes[begin : begin + form.num_microbatches]
        unused = form.num_microbatches - len(own)
        yield InferencePart(
            microbatches=_taken(batch, np.stack(chosen + chosen[-1:] * unused)),
            num_microbatches=form.num_microbatches,
            num_examples=sum(own),
            shares=np.asarray(own + [0] * unused, np.float32) / np.float32(form.microbatch),
        )


def _sizes(size: int, microbatch: int) -> list[int]:
    """Return the sizes of the parts of a batch: full microbatches, then the largest divisors that are left."""
    below = [d for d in range(1, math.isqrt(microbatch) + 1) if microbatch % d == 0]
    sizes, left = list[int](), size
    for divisor in sorted({*below, *(microbatch // d for d in below)}, reverse=True):
        count, left = divmod(left, divisor)
        sizes += [divisor] * count
    return sizes


def _taken(batch: Any, index: np.ndarray[Any, Any]) -> Any:
    def one(leaf: Any) -> Any:
        if not np.shape(leaf):
            return repeated(leaf, len(index))
        if isinstance(leaf, jax.ShapeDtypeStruct):  # this process does not read the leaf
            return jax.ShapeDtypeStruct((*index.shape, *leaf.shape[1:]), dtype_of(leaf))
        return jnp.take(leaf, index, axis=0) if isinstance(leaf, jax.Array) else np.asarray(leaf)[index]

    return jax.tree.map(one, batch)
