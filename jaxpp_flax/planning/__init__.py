"""Planning a training beforehand: a model of its step, the stages, the schedule and the residuals; a plan as a file."""

from jaxpp_flax.planning.choice import (
    Choice,
    LimitError,
    best_mixture,
    choose_residuals,
    describe,
    why_chosen,
)
from jaxpp_flax.planning.model import Hardware, Prediction, StageLoad, StepModel
from jaxpp_flax.planning.plan import Plan, PlannedBlock
from jaxpp_flax.planning.planner import PlanningStep, plan
from jaxpp_flax.planning.profile import StepProfile
from jaxpp_flax.planning.stages.policies import (
    AssignmentError,
    CutPolicy,
    balanced,
    block_names,
    by_name,
    even,
    segment_names,
    sizes,
)

__all__ = [
    "AssignmentError",
    "Choice",
    "CutPolicy",
    "Hardware",
    "LimitError",
    "Plan",
    "PlannedBlock",
    "PlanningStep",
    "Prediction",
    "StageLoad",
    "StepModel",
    "StepProfile",
    "balanced",
    "best_mixture",
    "block_names",
    "by_name",
    "choose_residuals",
    "describe",
    "even",
    "plan",
    "segment_names",
    "sizes",
    "why_chosen",
]
