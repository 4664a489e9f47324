"""Planning a step without devices: a model of its time and memory, the choice of its residuals, a search of schedules.

Pure Python over schedules, stage loads and hardware. Nothing here needs JAX.
"""

from jaxpp_flax.planning.choice import (
    Choice,
    LimitError,
    best_mixture,
    choose_residuals,
    describe,
    why_chosen,
)
from jaxpp_flax.planning.measured import measured_costs
from jaxpp_flax.planning.model import Hardware, Prediction, StageLoad, StageUse, StepModel
from jaxpp_flax.planning.schedule_search.search import Found, search

__all__ = [
    "Choice",
    "Found",
    "Hardware",
    "LimitError",
    "Prediction",
    "StageLoad",
    "StageUse",
    "StepModel",
    "best_mixture",
    "choose_residuals",
    "describe",
    "measured_costs",
    "search",
    "why_chosen",
]
