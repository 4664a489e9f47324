"""Callbacks: small classes with hooks that `fit` calls during training."""

from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord, has_failed
from jaxpp_flax.trainers.callbacks.profiling import Profile
from jaxpp_flax.trainers.callbacks.reporting import OnMetrics
from jaxpp_flax.trainers.callbacks.stop_conditions import EarlyStopping, TimeLimit

__all__ = [
    "Callback",
    "EarlyStopping",
    "OnMetrics",
    "Profile",
    "StepRecord",
    "TimeLimit",
    "has_failed",
]
