"""The named schedules as `PipelineSchedule` objects, for programs that look them up by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxpp_flax.messages import known_names
from jaxpp_flax.mpmd import options
from jaxpp_flax.mpmd.pipeline import PipelineSchedule

__all__ = ["PIPELINE_SCHEDULES", "get_pipeline_schedule"]


def _schedule(name: str) -> PipelineSchedule:
    required: dict[str, bool | str] = {"mpmd_pipeline_schedule": options.PIPELINE_SCHEDULES[name]}
    if name.startswith("ZERO_BUBBLE"):
        required["mpmd_split_bwd_fragments"] = True
    return PipelineSchedule((), required)


# The order of each schedule comes from `jaxpp_flax.schedules`, by the required option; builders can be added.
PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = MappingProxyType(
    {name: _schedule(name) for name in options.PIPELINE_SCHEDULES}
)


def get_pipeline_schedule(schedule_name: str) -> PipelineSchedule:
    """Return the schedule of a name such as `"ONE_FWD_ONE_BWD"`, for `make_config(pipeline_schedule=)`.

    Raises:
      KeyError: if no schedule has this name; the message lists similar names.

    Example:
      >>> get_pipeline_schedule("GPIPE").required_mpmd_options
      {'mpmd_pipeline_schedule': 'GPipe'}
    """
    if schedule_name not in PIPELINE_SCHEDULES:
        raise KeyError(f"unknown schedule {schedule_name!r}.{known_names(str(schedule_name), PIPELINE_SCHEDULES)}")
    return PIPELINE_SCHEDULES[schedule_name]
