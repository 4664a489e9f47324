"""The options of the assignment of blocks to stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from jaxpp_flax.assignment.resolution import AssignmentLike
from jaxpp_flax.schedules.planning import Hardware
from jaxpp_flax.trainers.assigner import check_cost, check_limit
from jaxpp_flax.trainers.options.base import misfit

__all__ = ["Assignment", "Balanced"]


@dataclass(frozen=True)
class Assignment:
    """The options of the assignment of blocks to stages, `assignment=`: policy, costs of blocks, memory limit.

    A value of `how` alone, such as `assignment="even"`, means `Assignment("even")`. See `docs/guides/stages.md`.

    Args:
      how: "auto", "even", "balanced", sizes such as `[3, 2, 3]`, a mapping of names (globs) to stages, a `Plan` or its
        JSON file, or a policy.
      cost: the costs of the blocks, for "balanced" and for the table of the assignment: "estimated" from operations and
        bytes, "flops", "measured" (each block compiled alone and timed), numbers, or a mapping from names to numbers.
        None: "estimated" with "auto" and "balanced", else no costs.
      memory_limit: bytes that each device may hold (one number, or one for each rank): parameters, gradients,
        optimizer state, and activations in flight. Stages recompute or offload what does not fit; "auto" and
        "balanced" also move blocks. What fits in no way is refused.
      hardware: the speeds that `memory_limit` weighs; None: rough ones of the platform.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Assignment([3, 2, 3], memory_limit=16e9).memory_limit
      16000000000.0
    """

    how: AssignmentLike = "auto"
    _: KW_ONLY
    cost: str | Sequence[float] | Mapping[str, float] | None = None
    memory_limit: float | Sequence[float] | None = None
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        if isinstance(self.how, Assignment):
            raise TypeError(f"Assignment({self.how!r}) holds another assignment. Pass that one alone.")
        if self.cost is not None:
            check_cost(self.cost)
        check_limit(self.memory_limit)
        if self.hardware is not None and not isinstance(self.hardware, Hardware):
            raise misfit("hardware", self.hardware, "a jaxpp_flax.schedules.planning.Hardware")

    @classmethod
    def of(cls, value: Assignment | AssignmentLike) -> Assignment:
        """Convert the trainer's `assignment=`."""
        return value if isinstance(value, Assignment) else Assignment(value)


@dataclass(frozen=True)
class Balanced(Assignment):
    """A balanced assignment: short for `Assignment("balanced", cost=..., memory_limit=...)`.

    Example:
      >>> Balanced(cost="measured", memory_limit=16e9).how
      'balanced'
    """

    how: AssignmentLike = field(default="balanced", init=False)
