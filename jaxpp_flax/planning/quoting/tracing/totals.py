"""Sums over what the blocks of a traced model hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from jaxpp_flax.planning.quoting.traced import Axes, TracedModel
from jaxpp_flax.planning.stages.balancing import Sizes

__all__ = ["gradients_of", "state_bytes", "sums_of_bytes"]


@lru_cache(maxsize=1024)
def gradients_of(model: TracedModel, microbatch: int, axes: Axes) -> tuple[float, ...]:
    """Return the bytes of the sums of gradients of each block."""
    found = [0.0] * len(model.names)
    for item in model.holdings(microbatch, axes):
        if item.kind == "gradients":
            found[item.blocks[0]] += item.nbytes
    return tuple(found)


@lru_cache(maxsize=4096)
def state_bytes(
    model: TracedModel, axes: Axes, sizes: Sizes, ranks: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Return for each rank the bytes of its gradients, and those that its update reads and writes.

    `ranks` are those of the stages.
    """
    rank_of = [rank for rank, size in zip(ranks, sizes, strict=True) for _ in range(size)]
    held: list[dict[str, float]] = [{} for _ in set(ranks)]
    for item in model.holdings(model.traces[0].microbatch, axes):
        for rank in {rank_of[block] for block in item.blocks}:
            held[rank][item.kind] = held[rank].get(item.kind, 0.0) + item.nbytes

    def moved(of: Mapping[str, float]) -> float:
        copies = of.get("parameters", 0.0)
        state = of.get("masters", 0.0) or copies
        return 2 * (state + of.get("optimizer", 0.0)) + of.get("gradients", 0.0) + (copies if "masters" in of else 0.0)

    return tuple((of.get("gradients", 0.0), moved(of)) for of in held)


@lru_cache(maxsize=4096)
def sums_of_bytes(model: TracedModel, microbatch: int, axes: Axes) -> tuple[float, float]:
    """Return the bytes of a whole model's weights and what belongs to them, and least of one microbatch's residuals."""
    found = Counter[str]()
    for item in model.holdings(microbatch, axes):
        found[item.kind] += item.nbytes  # type: ignore[assignment]
    state = sum(found[kind] for kind in ("parameters", "masters", "gradients", "optimizer"))
    return float(state), min(found["activations"], found["fused"])
