"""The most memory of a step over microbatches of several shapes, whatever mixture of these shapes a batch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.trainers.data.batch import signature

__all__ = ["worst_memory"]


def worst_memory(
    batch: StackedMicrobatches, compiled_for: Callable[[StackedMicrobatches], Any]
) -> tuple[dict[int, int], StackedMicrobatches]:
    """Return the most bytes that each rank holds, and the batch in which a rank holds the most.

    Two sorts of batches are walked: this one, and as many microbatches of one of its shapes, for each of them. A rank
    holds the same values in each mixture. So no mixture needs more if all values of one shape are the largest ones;
    else it is an estimate.

    Args:
      compiled_for: compiles the step for microbatches in their order; their shapes are compiled already.
    """
    shapes = {signature(item): item for item in batch.items}
    batches = [batch, *(StackedMicrobatches((item,) * len(batch.items)) for item in shapes.values())]
    held = [{of.rank: of.held_bytes for of in compiled_for(each).memory_analysis()} for each in batches]
    most = [max(of_ranks.values()) for of_ranks in held]
    return {rank: max(of[rank] for of in held) for rank in held[0]}, batches[most.index(max(most))]
