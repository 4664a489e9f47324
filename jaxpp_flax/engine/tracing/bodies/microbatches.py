"""A batch whose microbatches differ in shape: each is a pytree of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

__all__ = ["Microbatches", "StackedMicrobatches", "repeated_over", "shape_numbers"]


@dataclass(frozen=True, eq=False, repr=False)
class Microbatches(Sequence[Any]):
    """A batch as a list of microbatches, each with its own shapes: texts of several lengths, say.

    `PipelineTrainer.fit` takes such a batch in place of one pytree, and `treduce` takes it in place of a pytree of
    stacked arrays. It is a pytree itself. A stage is compiled once for each distinct shape: pad to a few lengths.

    Args:
      items: the microbatches: pytrees of one structure, whose leaves have the same dtypes and numbers of dimensions.
        For the trainer, the first axis of each leaf counts the examples of the microbatch, as in any batch.
      own_rows: for the trainer, with several processes: True if the items hold only this process's rows of each
        microbatch. Every process passes as many rows of the same shapes, and a microbatch is all of them together.
        Processes at one place of the data axis, one in each stage, pass the same rows.

    Raises:
      ValueError: if there is no microbatch, or two differ in more than their sizes.

    Example:
      >>> batch = Microbatches([{"tokens": np.zeros((4, 8), np.int32)}, {"tokens": np.zeros((2, 16), np.int32)}])
      >>> len(batch), [microbatch["tokens"].shape for microbatch in batch]
      (2, [(4, 8), (2, 16)])
    """

    items: Sequence[Any]
    own_rows: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        items = tuple(self.items)
        object.__setattr__(self, "items", items)
        if not items:
            raise ValueError("Microbatches holds no microbatch. Give at least one pytree of arrays.")
        first, tree = jax.tree_util.tree_flatten_with_path(items[0])
        for number, item in enumerate(items):
            leaves, other = jax.tree.flatten(item)
            if other != tree:
                raise ValueError(
                    f"microbatch {number} of Microbatches has the structure {other}, but microbatch 0 has {tree}. Give "
                    "every microbatch the same leaves."
                )
            for (path, wanted), leaf in zip(first, leaves, strict=True):
                if _kind(leaf) != _kind(wanted):
                    raise ValueError(
                        f"microbatch {number} of Microbatches has {_text(leaf)} at batch"
                        f"{jax.tree_util.keystr(path)}, but microbatch 0 has {_text(wanted)} there. Microbatches may "
                        "differ in sizes alone: convert the dtype, or add the missing axis."
                    )

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __repr__(self) -> str:
        shapes = ", ".join(str([np.shape(leaf) for leaf in jax.tree.leaves(item)]) for item in self.items[:4])
        more = f", and {len(self.items) - 4} more" if len(self.items) > 4 else ""
        return f"Microbatches({shapes}{more})"


@dataclass(frozen=True, eq=False)
class StackedMicrobatches:
    """Microbatches whose leaves have an axis of size 1 in front, as a loop slices them.

    A step that takes these is placed once for all patterns of its shapes: it must hand them to `treduce`, and use them
    for nothing else.

    Args:
      items: the microbatches.
      further: one microbatch for each further shape that the step is placed for: they are not run.
    """

    items: tuple[Any, ...]
    further: tuple[Any, ...] = ()

    def in_order(self, numbers: Sequence[int]) -> StackedMicrobatches:
        """Return the microbatches of these numbers, in this order."""
        return StackedMicrobatches(tuple(self.items[number] for number in numbers), self.further)


def _unflattened(own_rows: bool, items: Iterable[Any]) -> Microbatches:
    batch = object.__new__(Microbatches)  # JAX fills pytrees with anything: nothing is checked
    object.__setattr__(batch, "items", tuple(items))
    object.__setattr__(batch, "own_rows", own_rows)
    return batch


jax.tree_util.register_pytree_with_keys(
    Microbatches,
    lambda batch: ([(jax.tree_util.SequenceKey(i), item) for i, item in enumerate(batch.items)], batch.own_rows),
    _unflattened,
    lambda batch: (batch.items, batch.own_rows),
)
jax.tree_util.register_dataclass(StackedMicrobatches)


def repeated_over(spec: Any, argument: Any) -> Any:
    """Return a prefix tree for an argument of a step; one item of `StackedMicrobatches` stands for each of them."""
    if not isinstance(spec, StackedMicrobatches) or not isinstance(argument, StackedMicrobatches):
        return spec
    (of_item,) = spec.items
    return StackedMicrobatches((of_item,) * len(argument.items), (of_item,) * len(argument.further))


def shape_numbers(kinds: Sequence[Any]) -> list[int]:
    """Return the number of each microbatch's shape: shapes are numbered as they first appear.

    Example:
      >>> shape_numbers(["short", "long", "short"])
      [0, 1, 0]
    """
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def _kind(leaf: Any) -> tuple[Any, int]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = np.asarray(leaf).dtype
    if isinstance(dtype, np.dtype):  # PRNG keys have a dtype of JAX
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return dtype, np.ndim(leaf)


def _text(leaf: Any) -> str:
    return f"{_kind(leaf)[0]}{list(np.shape(leaf))}"
