"""Partitioning options under Shardy's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpp_flax.messages import known_names

__all__ = ["PIPELINE_SCHEDULES", "PartitioningOptions", "make_partitioning_options", "schedule_name"]

# The names of schedules, with their spelling in `mpmd_pipeline_schedule` of newer programs.
PIPELINE_SCHEDULES = {
    "GPIPE": "GPipe",
    "ONE_FWD_ONE_BWD": "1F1B",
    "CIRCULAR": "Circular",
    "CIRCULAR_WITH_REVERSED_BACKWARD": "CircularWithReversedBackward",
    "GPIPE_BUT_1F1B_FOR_LAST_MESH": "GPipeBut1F1BForLastMesh",
    "ZERO_BUBBLE_H1": "ZeroBubbleH1",
    "ZERO_BUBBLE_H2_ZERO_TX_LATENCY": "ZeroBubbleH2ZeroTxLatency",
    "ZERO_BUBBLE_H2_HALF_TX_LATENCY": "ZeroBubbleH2HalfTxLatency",
    "ZERO_BUBBLE_H2_FULL_TX_LATENCY": "ZeroBubbleH2FullTxLatency",
    "PARALLEL_PIPELINES_WITH_WRAP_AROUND": "ParallelPipelinesWithWrapAround",
}

_SCHEDULE = "mpmd_pipeline_schedule"
# These options of Shardy's compiler change nothing here: the compiler always does the same, or the results do not
# depend on it. Transfers and sums over meshes are inferred, each user of a region recomputes it, and equal programs are
# compiled once.
_SWITCHES = (
    "mpmd_infer_transfers",
    "mpmd_infer_cross_mesh_reductions",
    "mpmd_fragment_remat",
    "mpmd_merge_remat_fragments",
    "mpmd_split_bwd_fragments",
    "mpmd_assume_homogeneous_devices",
    "mpmd_absorb_inferred_fragments_on_entry_point_function",
    "mpmd_copy_constant_creation_from_producer_to_consumer",
    "mpmd_apply_merge_transfers_pass",
    "mpmd_merge_inferred_after_scheduling",
)


class PartitioningOptions(dict[str, Any]):
    """Checked options: a dictionary that can also be written with keywords.

    >>> PartitioningOptions(mpmd_pipeline_schedule="1F1B")
    {'mpmd_pipeline_schedule': '1F1B'}
    """

    def __init__(self, options: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__({**(options or {}), **more})
        for key, value in self.items():
            if key == _SCHEDULE:
                schedule_name(value)
            elif key not in _SWITCHES:
                raise ValueError(f"unknown partitioning option {key!r}.{known_names(key, (_SCHEDULE, *_SWITCHES))}")
            elif not isinstance(value, bool):
                raise ValueError(f"partitioning option {key} must be True or False, got {value!r}.")

    @property
    def schedule(self) -> str | None:
        """The schedule's name, one of `PIPELINE_SCHEDULES`, or None."""
        return schedule_name(self.get(_SCHEDULE))


def make_partitioning_options(options: Mapping[str, Any] | None = None) -> PartitioningOptions:
    """Check partitioning options.

    `mpmd_pipeline_schedule` names the schedule (see `PIPELINE_SCHEDULES`). The switches of Shardy's compiler
    (`mpmd_infer_transfers` and others) are accepted: here transfers and sums over meshes are always inferred, and the
    backward pass is split if the schedule asks for it.

    Raises:
      ValueError: for an unknown option or schedule, with similar names, or a switch that is not a bool.

    Example:
      >>> make_partitioning_options({"mpmd_pipeline_schedule": "ONE_FWD_ONE_BWD"}).schedule
      'ONE_FWD_ONE_BWD'
      >>> make_partitioning_options({"mpmd_pipeline_schedule": "ONE_FWD_TWO_BWD"})
      Traceback (most recent call last):
      ValueError: unknown schedule 'ONE_FWD_TWO_BWD'. Did you mean 'ONE_FWD_ONE_BWD'? ...
    """
    return PartitioningOptions(options)


def schedule_name(name: str | None) -> str | None:
    """Return the upper-case name of a schedule in either spelling; None for no schedule.

    Raises:
      ValueError: if the name is unknown; the message suggests similar names.
    """
    if name is None or name == "None":
        return None
    if name in PIPELINE_SCHEDULES:
        return name
    for known, spelt in PIPELINE_SCHEDULES.items():
        if name == spelt:
            return known
    raise ValueError(f"unknown schedule {name!r}.{known_names(str(name), PIPELINE_SCHEDULES)}")
