"""The exact bytes of a compiled training step, compared with `memory_limit=`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jaxpp_flax.assignment import AssignmentError, Plan
from jaxpp_flax.planning import Choice, describe
from jaxpp_flax.planning.limits import limits_of

__all__ = ["ExactBytes"]

_MOST_PLANS = 4  # that are compiled for one step


class ExactBytes:
    """Compares compiled plans with a memory limit, and notes what the model of a step has left out.

    Attributes:
      left_out: for each rank, the bytes that compiled steps held above the prediction; empty before the first one.
    """

    def __init__(self, memory_limit: float | Sequence[float] | None) -> None:
        self._limit = memory_limit
        self.forget()

    def forget(self) -> None:
        """Forget a step: what the model leaves out depends on the schedule and on the shapes of a batch."""
        self.left_out: tuple[float, ...] = ()
        self._refused: list[tuple[float, str]] = []

    def fit(self, plan: Plan, memory: Sequence[Any]) -> bool:
        """Return whether each rank of a plan's compiled step, from its `memory_analysis()`, is within the limit.

        Raises:
          AssignmentError: after a few plans that are not.
        """
        choice, held = plan.choice, [rank.argument_bytes + rank.peak_bytes for rank in memory]
        limits = limits_of(self._limit, len(held))
        over = [nbytes - limit for nbytes, limit in zip(held, limits, strict=True)]
        if choice is None or max(over) <= 0:
            return True
        rank = over.index(max(over))
        self._refused.append((over[rank], _told(plan, choice, rank, held[rank], limits[rank])))
        if len(self._refused) == _MOST_PLANS:
            excess, closest = min(self._refused)
            raise AssignmentError(
                f"{_MOST_PLANS} plans were compiled, and none keeps within memory_limit: {closest} Use more stages or "
                "devices, a schedule with fewer microbatches in flight, smaller microbatches, or a higher limit.",
                excess,
            )
        more = (max(0.0, of - said) for of, said in zip(held, choice.prediction.peak_bytes, strict=True))
        self.left_out = tuple(a + b for a, b in itertools.zip_longest(self.left_out, more, fillvalue=0.0))
        return False


def _told(plan: Plan, choice: Choice, rank: int, held: float, limit: float) -> str:
    ranks = plan.ranks or range(plan.num_stages)
    does = ", ".join(
        f"stage {stage}: {describe(choice.residuals.of(stage))}" for stage, of in enumerate(ranks) if of == rank
    )
    return (
        f"in the closest one, rank {rank} holds {held:,.0f} bytes on each device, but may hold {limit:,.0f} ({does}; "
        f"{choice.prediction.peak_bytes[rank]:,.0f} bytes were predicted)."
    )
