"""What a model's author touches: marking blocks, and which marks cut the model into stages."""

from pathlib import Path

from jax.extend import source_info_util

from jaxpp_flax.layers.assignment import (
    AssignmentError,
    CutPolicy,
    balanced,
    block_names,
    by_name,
    even,
    segment_names,
    sizes,
)
from jaxpp_flax.layers.choosing import resolve
from jaxpp_flax.layers.marking import pipeline_stage
from jaxpp_flax.layers.nnx import PipelineStage
from jaxpp_flax.layers.plan import Plan, PlannedBlock
from jaxpp_flax.layers.scan import join_layers, join_scanned, split_layers, split_scanned

# Messages name the user's line, not ours.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))

__all__ = [
    "AssignmentError",
    "CutPolicy",
    "PipelineStage",
    "Plan",
    "PlannedBlock",
    "balanced",
    "block_names",
    "by_name",
    "even",
    "join_layers",
    "join_scanned",
    "pipeline_stage",
    "resolve",
    "segment_names",
    "sizes",
    "split_layers",
    "split_scanned",
]
