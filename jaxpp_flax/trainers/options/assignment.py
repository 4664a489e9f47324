"""The options of the assignment of blocks to stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from jaxpp_flax.assignment.resolution import AssignmentLike
from jaxpp_flax.messages import near_names
from jaxpp_flax.planning import Hardware
from jaxpp_flax.planning.limits import check_memory_limit
from jaxpp_flax.trainers.options.base import misfit

__all__ = ["Assignment", "Balanced"]

_SOURCES = ("estimated", "flops", "measured")


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
            _check_cost(self.cost)
        check_memory_limit(self.memory_limit)
        if self.hardware is not None and not isinstance(self.hardware, Hardware):
            raise misfit("hardware", self.hardware, "a jaxpp_flax.planning.Hardware")

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


def _check_cost(cost: Any) -> None:
    """Refuse values that are not costs of blocks.

    Raises:
      ValueError, TypeError: if `cost` is not a source of costs, and not numbers of at least 0.
    """
    if isinstance(cost, str):
        if cost not in _SOURCES:
            raise ValueError(
                f"cost={cost!r} is unknown.{near_names(cost, _SOURCES)} Use {', '.join(map(repr, _SOURCES))}, a number "
                "for each block, or a mapping from names of blocks to numbers."
            )
        return
    numbers = cost.values() if isinstance(cost, Mapping) else cost if isinstance(cost, Sequence) else None
    if numbers is None:
        raise TypeError(
            f"cost is {cost!r} ({type(cost).__name__}); it must be {', '.join(map(repr, _SOURCES))}, a list of "
            "numbers, or a mapping from names of blocks to numbers."
        )
    for value in numbers:
        if not _is_number(value) or not math.isfinite(float(value)) or float(value) < 0:
            raise ValueError(f"cost= holds {value!r}; costs are numbers of at least 0.")


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, (bool, str)) and getattr(value, "ndim", 0) == 0
