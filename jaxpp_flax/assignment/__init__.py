"""The assignment of blocks to stages: policies, costs of blocks, memory of a stage, plans."""

from jaxpp_flax.assignment.plan import Plan, PlannedBlock
from jaxpp_flax.assignment.policies import (
    AssignmentError,
    CutPolicy,
    auto,
    balanced,
    block_names,
    by_name,
    even,
    segment_names,
    sizes,
)
from jaxpp_flax.assignment.resolution import resolve

__all__ = [
    "AssignmentError",
    "CutPolicy",
    "Plan",
    "PlannedBlock",
    "auto",
    "balanced",
    "block_names",
    "by_name",
    "even",
    "resolve",
    "segment_names",
    "sizes",
]
