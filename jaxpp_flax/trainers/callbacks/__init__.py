"""What happens beside training: `Callback` to subclass, and common ones."""

from jaxpp_flax.trainers.callbacks.base import Callback, OnMetrics
from jaxpp_flax.trainers.callbacks.common import EarlyStopping, PrintLoss

__all__ = ["Callback", "EarlyStopping", "OnMetrics", "PrintLoss"]
