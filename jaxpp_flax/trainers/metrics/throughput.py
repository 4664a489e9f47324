"""The unit of a run's throughput, and the number of these units in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers.data.batch import count_units, examples_in_all

__all__ = ["Throughput"]


@dataclass(frozen=True)
class Throughput:
    """Counts the units of a batch, such as tokens without padding: `Logging(throughput=)`.

    Args:
      unit: the name of the unit: rows have `{unit}_per_second`.
      of: the leaf of the batch to count, by its path (`"targets"`, `"inputs/mask"`), or a function of the batch that
        returns a number; only process 0 counts. None counts the entries of the first integer leaf with two axes; if
        there is none, it counts examples.
      padding: entries of the leaf with this value are not counted: 0 for masks.

    Raises:
      TypeError, ValueError: if a field has a value that does not fit; the message names the field.

    Example:
      >>> batch = {"tokens": np.array([[5, 7, 0, 0], [1, 0, 0, 0]])}
      >>> Throughput("tokens", of="tokens").count(batch), Throughput("rows", of=lambda batch: 2).count(batch)
      ((3, 'tokens'), (2, 'rows'))
    """

    unit: str = "tokens"
    of: str | Callable[[Any], Any] | None = None
    padding: Any = 0

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or not self.unit.isidentifier():
            raise ValueError(f"Throughput(unit={self.unit!r}): it must be a word such as 'tokens'.")
        if self.of is not None and not isinstance(self.of, str) and not callable(self.of):
            raise TypeError(f"Throughput(of={self.of!r}): it must be the path of a leaf, or a function of the batch.")

    def count(self, batch: Any, global_batch_size: int | None = None) -> tuple[int, str]:
        """Return the number of units in the whole batch, and their name.

        With `global_batch_size`, the batch has only this process's rows: the whole batch counts in proportion.

        Raises:
          ValueError: if the batch has no such leaf, or this process only has the leaf's shape.
        """
        if self.of is None:
            return count_units(batch, global_batch_size)
        if jax.process_index() > 0:  # process 0 shows the rate; the others may have shapes in place of leaves
            return 0, self.unit
        found = int(self.of(batch)) if callable(self.of) else self._count_leaf(batch, self.of)
        if global_batch_size is not None:
            found = round(found * global_batch_size / examples_in_all(batch))
        return found, self.unit

    def _count_leaf(self, batch: Any, path: str) -> int:
        leaves = flatten(batch)[0]
        if path not in leaves:
            raise ValueError(
                f"Logging(throughput=Throughput({self.unit!r}, of={path!r})): the batch has no such leaf. Its leaves: "
                f"{', '.join(map(repr, leaves))}. Pass one of these, or a function of the batch."
            )
        leaf = leaves[path]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"Logging(throughput=Throughput({self.unit!r}, of={path!r})): this process passes only the shape of "
                "this leaf. Count a leaf that process 0 has, or pass a function of the batch."
            )
        return int(np.count_nonzero(np.asarray(leaf) != self.padding))
