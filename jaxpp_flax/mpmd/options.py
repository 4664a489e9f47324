"""Partitioning options under Shardy's names, and the names of schedules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_flax.messages import known_names

__all__ = [
    "PIPELINE_SCHEDULES",
    "PartitioningOptions",
    "make_partitioning_options",
    "options_of_ranks",
    "schedule_name",
    "validate_and_merge_partitioning_options",
]

_logger = logging.getLogger(__name__)

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
_INFER_TRANSFERS = "mpmd_infer_transfers"
_SPLIT_BACKWARD = "mpmd_split_bwd_fragments"
# Switches of Shardy's compiler. `_INFER_TRANSFERS` says where some results go, `_SPLIT_BACKWARD` splits for fragment
# rules. The others change nothing here: the compiler always does the same, or the results do not depend on it.
# Transfers and sums over meshes are inferred, each user of a region recomputes it, equal programs are compiled once.
_SWITCHES = (
    _INFER_TRANSFERS,
    "mpmd_infer_cross_mesh_reductions",
    "mpmd_fragment_remat",
    "mpmd_merge_remat_fragments",
    _SPLIT_BACKWARD,
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

    @property
    def infers_transfers(self) -> bool:
        """True if a result that is made from several meshes goes to the first mesh, as with Shardy's compiler."""
        return bool(self.get(_INFER_TRANSFERS))

    @property
    def splits_backward(self) -> bool:
        """True if fragment rules see each backward computation as two fragments."""
        return bool(self.get(_SPLIT_BACKWARD))


def make_partitioning_options(options: Mapping[str, Any] | None = None) -> PartitioningOptions:
    """Check partitioning options.

    `mpmd_pipeline_schedule` names the schedule (see `PIPELINE_SCHEDULES`). The switches of Shardy's compiler are
    accepted: here transfers and sums over meshes are always inferred, and the backward pass is split if the schedule
    asks for it. Two of them change something: with `mpmd_infer_transfers=True`, a result that unnamed work makes from
    several meshes goes to the first mesh of the topology, as with Shardy's compiler, and not where the fewest bytes are
    transferred; `mpmd_split_bwd_fragments=True` splits backward computations for the rules of a `PipelineSchedule`.

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


def validate_and_merge_partitioning_options(
    pipeline_required_options: Mapping[str, Any] | None, user_provided_options: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the user's options with the options that a `PipelineSchedule` requires; required switches are logged.

    Raises:
      ValueError: if the user gave another value for a required option, or an option is unknown.

    Example:
      >>> validate_and_merge_partitioning_options(None, {"mpmd_infer_transfers": True})
      {'mpmd_infer_transfers': True}
    """
    if pipeline_required_options is None:
        return user_provided_options
    given = dict(user_provided_options or {})
    conflicts = [
        f"{key}: the pipeline schedule requires {value}, user specified {given[key]}"
        for key, value in pipeline_required_options.items()
        if key in given and not _same_option(key, given[key], value)
    ]
    if conflicts:
        raise ValueError(
            f"Conflicting partitioning options detected: {'; '.join(conflicts)}. Leave these options out of "
            "partitioning_options, or give them the values that the schedule requires."
        )
    for key, value in pipeline_required_options.items():
        if key not in given and key != _SCHEDULE:
            _logger.warning("partitioning option %s is set to %s (required by pipeline schedule)", key, value)
    return PartitioningOptions({**pipeline_required_options, **given})


def _same_option(key: str, one: Any, other: Any) -> bool:
    return schedule_name(one) == schedule_name(other) if key == _SCHEDULE else one == other


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
