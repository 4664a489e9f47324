"""Planning a step without devices: a model of its time and memory, and the choice of its residuals."""

from jaxpp_flax.schedules.planning.choice import (
    Choice,
    LimitError,
    best_mixture,
    choose_residuals,
    describe,
    why_chosen,
)
from jaxpp_flax.schedules.planning.model import Hardware, Prediction, StageLoad, StageUse, StepModel

__all__ = [
    "Choice",
    "Hardware",
    "LimitError",
    "Prediction",
    "StageLoad",
    "StageUse",
    "StepModel",
    "best_mixture",
    "choose_residuals",
    "describe",
    "why_chosen",
]
