"""`jaxpp.pipelining`."""

from jaxpp_flax.api import mark_stage_end, pipeline_enter_stage

__all__ = ["mark_stage_end", "pipeline_enter_stage"]
