"""What differs between the fronts of the engine: the class of a step's results, and the place of idle values."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = ["Front"]


@dataclass(frozen=True, kw_only=True)
class Front:
    """The choices of a front, such as `jaxpp_flax.api`, for the steps that it compiles.

    Attributes:
      array_type: the class of a step's results.
      idle_everywhere: whether an idle value lives on all ranks, or on rank 0 alone. A result is idle if no stage reads
        it and every rank can compute it without a transfer: the count of steps, a key.
    """

    array_type: type[MpmdArray] = MpmdArray
    idle_everywhere: bool = False

    def idle_ranks(self, num_ranks: int) -> frozenset[int]:
        """Return the ranks of idle values.

        Example:
          >>> sorted(Front(idle_everywhere=True).idle_ranks(3))
          [0, 1, 2]
        """
        return frozenset(range(num_ranks if self.idle_everywhere else 1))
