"""Hooks into training: the base class `Callback`, and common callbacks."""

from jaxpp_flax.trainers.callbacks.base import Callback, OnMetrics
from jaxpp_flax.trainers.callbacks.common import EarlyStopping, PrintLoss

__all__ = ["Callback", "EarlyStopping", "OnMetrics", "PrintLoss"]
