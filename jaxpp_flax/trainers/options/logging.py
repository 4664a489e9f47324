"""The options of metrics and of the progress display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jaxpp_flax.trainers.loop.progress import Meter
from jaxpp_flax.trainers.loop.tracked_run import as_config
from jaxpp_flax.trainers.loop.trackers import Tracker
from jaxpp_flax.trainers.options.base import Options
from jaxpp_flax.trainers.setup import check_count
from jaxpp_flax.trainers.step.learning_rate import find_learning_rate
from jaxpp_flax.trainers.step.metrics import StepMetric, StepMetrics, check_metrics

__all__ = ["Logging"]


@dataclass(frozen=True, kw_only=True)
class Logging(Options):
    """The options of metrics and of the progress display: `logging=`.

    A boolean alone means `Logging(progress=...)`: `logging=False` shows nothing.

    Args:
      tracker: gets the configuration and the metrics; with several processes, in process 0.
      config: a mapping or a dataclass, for the tracker beside the number of stages and the like.
      every: steps between two rows of metrics.
      progress: True for a bar on a terminal and lines elsewhere, False for nothing, or a `Meter`.
      metrics: what a step computes and returns besides the metrics of the loss: any of "learning_rate",
        "gradient_norm", "parameter_norm" and "update_ratio" (the norm of the update over that of the parameters before
        it); True for all of them. Norms are over all trained parameters.
      learning_rate: for the metric of this name: a number, or a function of the number of steps done. None: from the
        optimizer (`optax.inject_hyperparams`, or the rate or schedule of Optax's own optimizers).

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Logging(every=100, progress=False).every
      100
    """

    tracker: Tracker | None = None
    config: Any = None
    every: int = 10
    progress: bool | Meter = True
    metrics: Sequence[StepMetric] | bool = ()
    learning_rate: float | Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        as_config(self.config)
        check_metrics(self.metrics)
        if not isinstance(self.progress, (bool, Meter)):
            kind = type(self.progress).__name__
            raise TypeError(f"progress={self.progress!r} ({kind}): it must be True, False or a Meter.")

    @classmethod
    def of(cls, value: Logging | bool | None) -> Logging:
        """Convert the trainer's `logging=`."""
        return cls(progress=value) if isinstance(value, bool) else super().of(cast(Any, value))

    def step_metrics(self, tx: Any, opt_state: Any) -> StepMetrics:
        """Return the metrics that steps of this optimizer compute; `opt_state` is its state, arrays or shapes.

        Raises:
          ValueError: if the learning rate is asked for, and cannot be found.
        """
        names = check_metrics(self.metrics)
        rate = find_learning_rate(tx, opt_state, self.learning_rate) if "learning_rate" in names else None
        return StepMetrics(names=names, learning_rate=rate)
