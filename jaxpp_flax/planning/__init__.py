"""Plan a training before it runs: choose stages, schedule, residuals and layout; save the plan as a file."""

from jaxpp_flax.planning.choice import (
    Choice,
    LimitError,
    best_mixture,
    choose_residuals,
    describe,
    why_chosen,
)
from jaxpp_flax.planning.compilers.described import described_devices, described_mesh
from jaxpp_flax.planning.compilers.report import CompilerReport, compiler_report
from jaxpp_flax.planning.model import Hardware, Prediction, StageLoad, StepModel
from jaxpp_flax.planning.plan import Plan, PlannedBlock
from jaxpp_flax.planning.planner import PlanningStep, plan
from jaxpp_flax.planning.profile import StepProfile
from jaxpp_flax.planning.quoting.curves import Curves, MeasuredCurves
from jaxpp_flax.planning.quoting.devices import Device, device_named
from jaxpp_flax.planning.quoting.layouts import Layout
from jaxpp_flax.planning.quoting.quote import Quote, quote
from jaxpp_flax.planning.quoting.search import Ranking
from jaxpp_flax.planning.quoting.step import QuotedStep, Quoter
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
    "CompilerReport",
    "Curves",
    "CutPolicy",
    "Device",
    "Hardware",
    "Layout",
    "LimitError",
    "MeasuredCurves",
    "Plan",
    "PlannedBlock",
    "PlanningStep",
    "Prediction",
    "Quote",
    "QuotedStep",
    "Quoter",
    "Ranking",
    "StageLoad",
    "StepModel",
    "StepProfile",
    "balanced",
    "best_mixture",
    "block_names",
    "by_name",
    "choose_residuals",
    "compiler_report",
    "describe",
    "described_devices",
    "described_mesh",
    "device_named",
    "even",
    "plan",
    "quote",
    "segment_names",
    "sizes",
    "why_chosen",
]
