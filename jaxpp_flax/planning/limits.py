"""Memory limits: one number of bytes for every rank, or one for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxpp_flax.schedules.errors import ScheduleError

__all__ = ["check_memory_limit", "limits_of"]


def check_memory_limit(limit: Any) -> None:
    """Refuse a value that is neither None, nor a number of bytes above 0, nor a sequence of such numbers.

    Raises:
      ScheduleError: the message names the value.
    """
    if limit is None:
        return
    listed = limit if isinstance(limit, Sequence) and not isinstance(limit, str) else (limit,)
    for value in listed:
        is_number = hasattr(value, "__float__") and not isinstance(value, (bool, str)) and not getattr(value, "ndim", 0)
        if not is_number or not float(value) > 0:
            raise ScheduleError(
                f"memory_limit={limit!r}: it must be a number of bytes above 0, or one such number for each rank."
            )


def limits_of(memory_limit: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    """Return the limit of each rank; infinity for None.

    Raises:
      ScheduleError: for another number of limits than ranks, and for a limit that is no number of bytes above 0.
    """
    if memory_limit is None:
        return (math.inf,) * num_ranks
    check_memory_limit(memory_limit)
    listed = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * num_ranks
    if len(listed) != num_ranks:
        raise ScheduleError(
            f"memory_limit has {len(listed)} numbers for {num_ranks} ranks. Give one for each, or one number for all."
        )
    return tuple(map(float, listed))
