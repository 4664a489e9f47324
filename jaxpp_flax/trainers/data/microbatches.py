"""A batch whose microbatches differ in shape: each is a pytree of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp_flax.trainers.data.batch import batch_size, dtype_of
from jaxpp_flax.trainers.errors import BatchError

__all__ = ["Microbatches"]


@dataclass(frozen=True, eq=False)
class Microbatches(Sequence[Any]):
    """A batch as a list of microbatches, each with its own shapes: texts of several lengths, say.

    `PipelineTrainer.fit` takes such a batch in place of one pytree. Each microbatch may have its own number of examples
    and its own lengths. A stage is compiled once for each distinct shape, so pad to a few lengths.

    Args:
      items: the microbatches: pytrees of one structure, whose leaves have the same dtypes and numbers of dimensions.
        The first axis of each leaf counts the examples of the microbatch; a leaf without axes is a constant of it.

    Raises:
      BatchError: if there is no microbatch, one has no examples, or two differ in more than their sizes.

    Example:
      >>> batch = Microbatches([{"tokens": np.zeros((4, 8), np.int32)}, {"tokens": np.zeros((2, 16), np.int32)}])
      >>> len(batch), [microbatch["tokens"].shape for microbatch in batch]
      (2, [(4, 8), (2, 16)])
    """

    items: Sequence[Any]

    def __post_init__(self) -> None:
        items = tuple(self.items)
        object.__setattr__(self, "items", items)
        if not items:
            raise BatchError("Microbatches holds no microbatch. Give at least one pytree of arrays.")
        first, tree = jax.tree_util.tree_flatten_with_path(items[0])
        for number, item in enumerate(items):
            if batch_size(item) == 0:
                raise BatchError(f"microbatch {number} of Microbatches has no examples. Leave it out.")
            leaves, other = jax.tree.flatten(item)
            if other != tree:
                raise BatchError(
                    f"microbatch {number} of Microbatches has the structure {other}, but microbatch 0 has {tree}. Give "
                    "every microbatch the same leaves."
                )
            for (path, wanted), leaf in zip(first, leaves, strict=True):
                if _kind(leaf) != _kind(wanted):
                    raise BatchError(
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


def _kind(leaf: Any) -> tuple[Any, int]:
    return dtype_of(leaf), np.ndim(leaf)


def _text(leaf: Any) -> str:
    return f"{dtype_of(leaf)}{list(np.shape(leaf))}"
