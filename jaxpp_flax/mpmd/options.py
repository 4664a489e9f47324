"""Partitioning options under Shardy's names, and the names of schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_flax.messages import known_names
from jaxpp_flax.schedules import Schedule, by_name

__all__ = [
    "PIPELINE_SCHEDULES",
    "PartitioningOptions",
    "by_stages",
    "options_of_ranks",
    "schedule_name",
]

# For each name of a schedule: its spelling in newer programs, its order's name in `jaxpp_flax.schedules`, and whether
# that takes several stages on a mesh.
_SCHEDULES = {
    "GPIPE": ("GPipe", "interleaved_gpipe", True),
    "ONE_FWD_ONE_BWD": ("1F1B", "1f1b", False),
    "CIRCULAR": ("Circular", "circular", True),
    "CIRCULAR_WITH_REVERSED_BACKWARD": ("CircularWithReversedBackward", "circular_reversed", True),
    "GPIPE_BUT_1F1B_FOR_LAST_MESH": ("GPipeBut1F1BForLastMesh", "gpipe_1f1b_last", False),
    "ZERO_BUBBLE_H1": ("ZeroBubbleH1", "zero_bubble", False),
    "ZERO_BUBBLE_H2_ZERO_TX_LATENCY": ("ZeroBubbleH2ZeroTxLatency", "zero_bubble_h2", False),
    "ZERO_BUBBLE_H2_HALF_TX_LATENCY": ("ZeroBubbleH2HalfTxLatency", "zero_bubble_h2_half_latency", False),
    "ZERO_BUBBLE_H2_FULL_TX_LATENCY": ("ZeroBubbleH2FullTxLatency", "zero_bubble_h2_full_latency", False),
}

# The names of schedules, with their spelling in `mpmd_pipeline_schedule` of newer programs.
PIPELINE_SCHEDULES = {name: spelling for name, (spelling, _, _) in _SCHEDULES.items()}

_SCHEDULE = "mpmd_pipeline_schedule"


class PartitioningOptions(dict[str, Any]):
    """Checked options: a dictionary that can also be written with keywords.

    `mpmd_pipeline_schedule` names the schedule (see `PIPELINE_SCHEDULES`).

    Raises:
      ValueError: for an unknown option or schedule, with similar names.

    Example:
      >>> PartitioningOptions(mpmd_pipeline_schedule="1F1B").schedule
      'ONE_FWD_ONE_BWD'
      >>> PartitioningOptions({"mpmd_pipeline_schedule": "ONE_FWD_TWO_BWD"})
      Traceback (most recent call last):
      ValueError: unknown schedule 'ONE_FWD_TWO_BWD'. Did you mean 'ONE_FWD_ONE_BWD'? ...
    """

    def __init__(self, options: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__({**(options or {}), **more})
        for key in self:
            if key != _SCHEDULE:
                raise ValueError(
                    f"unknown partitioning option {key!r}.{known_names(key, [_SCHEDULE])} Leave out the switches of "
                    "Shardy's compiler: they change nothing here. Transfers and sums over meshes are always inferred, "
                    "a result goes where few bytes are transferred or as `output_mesh_assignment` says, each user of a "
                    "region recomputes it, a schedule splits the backward if it needs that, and equal programs are "
                    "compiled once."
                )
        schedule_name(self.get(_SCHEDULE))

    @property
    def schedule(self) -> str | None:
        """The schedule's name, one of `PIPELINE_SCHEDULES`, or None."""
        return schedule_name(self.get(_SCHEDULE))


def schedule_name(name: str | None) -> str | None:
    """Return the upper-case name of a schedule in either spelling; None for no schedule.

    Raises:
      ValueError: if the name is unknown; the message suggests similar names.
    """
    if name is None or name == "None":
        return None
    for upper, spelt in PIPELINE_SCHEDULES.items():
        if name in (upper, spelt):
            return upper
    raise ValueError(f"unknown schedule {name!r}.{known_names(str(name), PIPELINE_SCHEDULES)}")


def by_stages(name: str, num_stages: int, num_meshes: int) -> Schedule:
    """Return the schedule of a name of `PIPELINE_SCHEDULES`; some names want a mesh for each stage.

    Example:
      >>> by_stages("ZERO_BUBBLE_H1", 4, 2), by_stages("CIRCULAR", 4, 2)
      (ZeroBubble(num_stages=4, num_ranks=4), Circular(num_stages=4, num_ranks=2))
    """
    _, order, takes_several = _SCHEDULES[name]
    return by_name(order, num_stages, num_meshes if takes_several else None)


def options_of_ranks(options: Mapping[str, Any], names: Sequence[str]) -> dict[int, Mapping[str, Any]]:
    """Return XLA's options for each rank, from one mapping for all meshes or from a mapping of mesh names to options.

    Raises:
      TypeError: if some values are mappings and others are not.
      ValueError: if a key is no name of a mesh.

    Example:
      >>> options_of_ranks({"m1": {"xla_cpu_enable_fast_math": True}}, ["m0", "m1"])
      {1: {'xla_cpu_enable_fast_math': True}}
    """
    by_mesh = [key for key, value in options.items() if isinstance(value, Mapping)]
    if not by_mesh:
        return dict.fromkeys(range(len(names)), options)
    if other := [key for key in options if key not in by_mesh]:
        raise TypeError(
            f"compiler_options holds options of meshes ({', '.join(by_mesh)}) beside single options "
            f"({', '.join(other)}). Pass one mapping for all meshes, or a mapping for each mesh by its name."
        )
    for name in by_mesh:
        if name not in names:
            raise ValueError(
                f"compiler_options are given for the mesh {name!r}, which the topology lacks.{known_names(name, names)}"
            )
    return {names.index(name): options[name] for name in by_mesh}
