"""The cost of each block of a loop: estimated, counted, measured, or given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxpp_flax.messages import near_names
from jaxpp_flax.planning.loads import flops_per_byte
from jaxpp_flax.planning.predicted.blocks import Blocks, Work
from jaxpp_flax.planning.profile import StepProfile
from jaxpp_flax.planning.stages.policies import AssignmentError, segment_names

__all__ = ["Costing", "block_costs"]

Costing: TypeAlias = "str | StepProfile | Sequence[float] | Mapping[str, float]"
"""The type of `costs=`: see `plan`."""

_SOURCES = ("estimated", "flops")
_FORWARD_SHARE = 1 / 3  # of a given cost: a backward has two contractions for each one of the forward


def block_costs(blocks: Blocks, costs: Costing, platform: str, examples: float) -> tuple[list[Work], str, str]:
    """Return the cost of each block and of the work after the last mark; then the source of the costs and their unit.

    `examples` are those of a microbatch, divided by the devices of a rank.

    Raises:
      AssignmentError, TypeError: if `costs` is no source of costs, and not a number of at least 0 for each block.
    """
    names = segment_names(blocks.body.marks)
    if isinstance(costs, StepProfile):
        return costs.work_of(names, blocks.work(flops_per_byte(platform)), examples), "measured", "s"
    if isinstance(costs, str):
        if costs not in _SOURCES:
            raise AssignmentError(
                f"costs={costs!r} is unknown.{near_names(costs, _SOURCES)} Use {', '.join(map(repr, _SOURCES))}, a "
                "step measured by trainer.profile_step, a number for each block, or a mapping from names to numbers."
            )
        counted = costs == "flops"
        work = blocks.work(0.0 if counted else flops_per_byte(platform))
        return list(work), "operations counted" if counted else "operations and bytes estimated", "FLOP"
    return _given(costs, names), "given costs", ""


def _given(costs: Any, names: Sequence[str]) -> list[Work]:
    """Return the user's own costs, forward and backward together; the part after the last block may have no cost."""
    if isinstance(costs, Mapping):
        for name in costs:
            if name not in names:
                hint = near_names(name, names)
                raise AssignmentError(f"costs= names {name!r}, which is not a block of the model.{hint}")
        missing = [name for name in names[:-1] if name not in costs]
        if missing:
            raise AssignmentError(f"costs= leaves out {missing[0]!r}. Give a number for each block.")
        costs = [costs.get(name, 0.0) for name in names]
    if not isinstance(costs, Sequence):
        raise TypeError(f"costs is {costs!r} ({type(costs).__name__}); it must be numbers for blocks, see `plan`.")
    if len(costs) not in (len(names) - 1, len(names)):
        raise AssignmentError(
            f"costs= has {len(costs)} numbers for {len(names) - 1} blocks. Give one for each, and optionally one more "
            f"for the work after the last block ({names[-1]!r})."
        )
    for value in costs:
        if isinstance(value, (bool, str)) or not math.isfinite(value) or value < 0:
            raise AssignmentError(f"costs= holds {value!r}; costs are numbers of at least 0.")
    every = [float(value) for value in (*costs, 0.0)[: len(names)]]
    return [Work(value * _FORWARD_SHARE, value - value * _FORWARD_SHARE) for value in every]
