"""Callbacks: small classes with hooks that `fit` calls during training."""

from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord, has_failed
from jaxpp_flax.trainers.callbacks.profiling import Profile
from jaxpp_flax.trainers.callbacks.reporting import OnMetrics, PrintLoss
from jaxpp_flax.trainers.callbacks.samples import SamplePredictions
from jaxpp_flax.trainers.callbacks.stop_conditions import EarlyStopping, StopOnFile, TimeLimit

__all__ = [
    "Callback",
    "EarlyStopping",
    "OnMetrics",
    "PrintLoss",
    "Profile",
    "SamplePredictions",
    "StepRecord",
    "StopOnFile",
    "TimeLimit",
    "has_failed",
]
