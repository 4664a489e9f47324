"""The best checkpoint by a metric, through Orbax's own policy and files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orbax.checkpoint import checkpoint_managers as policies

__all__ = ["Best"]


@dataclass(frozen=True)
class Best:
    """The metric that ranks checkpoints. A checkpoint without the metric, or with NaN, is the worst.

    Raises:
      ValueError: if an argument has a value that does not fit; the message names the argument.

    Example:
      >>> Best("accuracy", "max").order(0.9) > Best("accuracy", "max").order(0.8)
      True
    """

    best: str
    best_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.best, str) or not self.best:
            raise ValueError(f'best={self.best!r}: it must be the name of a metric, such as "eval_loss".')
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={self.best_mode!r}: it must be 'min' or 'max'.")

    def value(self, metrics: Mapping[str, float] | None) -> float:
        """Return the metric, or NaN without it."""
        return float((metrics or {}).get(self.best, math.nan))

    def order(self, value: float) -> float:
        """Return a number that is larger for a better value."""
        return -math.inf if math.isnan(value) else value if self.best_mode == "max" else -value

    def policy(self) -> policies.PreservationPolicy:
        """Return the policy of Orbax that keeps the best checkpoint."""
        return policies.BestN(
            get_metric_fn=lambda metrics: self.order(self.value(metrics)), n=1, keep_checkpoints_without_metrics=False
        )
