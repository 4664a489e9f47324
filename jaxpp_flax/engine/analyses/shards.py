"""The number of shards of a partition, and the dimension of an argument that is really sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim

__all__ = ["ShardCounts"]


@dataclass(frozen=True)
class ShardCounts:
    """The number of shards over an entry of a PartitionSpec.

    Example:
      >>> shards = ShardCounts({"data": 4, "tensor": 2, "expert": 1})
      >>> shards("data"), shards(("data", "tensor")), shards.batch_dim(PartitionSpec("expert", "data"))
      (4, 8, (1, 'data'))
    """

    axes: Mapping[str, int]

    def __call__(self, entry: Any) -> int:
        """Return the product of the sizes of the entry's axes."""
        names = entry if isinstance(entry, tuple) else (entry,)
        return math.prod(self.axes[name] for name in names)

    def batch_dim(self, spec: PartitionSpec) -> BatchDim | None:
        """Return the first dimension of an argument that is really sharded."""
        for dim, entry in enumerate(spec):
            if entry is not None and self(entry) > 1:
                return dim, entry
        return None
