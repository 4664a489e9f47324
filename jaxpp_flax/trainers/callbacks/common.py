"""Callbacks that many runs need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxpp_flax.trainers.callbacks.base import Callback

__all__ = ["EarlyStopping", "PrintLoss"]


class PrintLoss(Callback):
    """Prints a line such as `step 20  loss 2.34567`.

    Args:
      every: steps between two lines.
      digits: the number of digits after the point.
    """

    def __init__(self, *, every: int = 1, digits: int = 5) -> None:
        super().__init__(every=every)
        self._digits = digits

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the loss."""
        trainer.message(f"step {step}  loss {metrics['loss']:.{self._digits}f}")


class EarlyStopping(Callback):
    """Ends `fit` when a metric has not improved in `patience` evaluations.

    Checkpoints keep the best value and the number of evaluations since: a resumed run continues to count, and a stopped
    run stays stopped. Without `resume=`, each `fit` begins to count again.

    Args:
      metric: the name of the metric; smaller is better.
      patience: evaluations without improvement, at least 1.
      min_delta: the smallest change that counts as an improvement.
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0) -> None:
        super().__init__()
        if patience < 1:
            raise ValueError(f"EarlyStopping(patience={patience}): it must be at least 1.")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self.set_state(None)

    def get_state(self) -> dict[str, Any]:
        """Return the best value, and the number of evaluations since."""
        return {"best": self._best, "bad": self._bad}

    def set_state(self, state: Any) -> None:
        """Continue to count from `state`."""
        self._best, self._bad = (math.inf, 0) if state is None else (float(state["best"]), int(state["bad"]))

    def on_fit_start(self, trainer: Any) -> None:
        """Stop again a run that was stopped before."""
        self._stop_where_due(trainer)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare the metric with the best value so far."""
        if self._metric not in metrics:
            raise KeyError(f"EarlyStopping watches {self._metric!r}; the evaluation has {', '.join(sorted(metrics))}.")
        value = float(metrics[self._metric])
        if value < self._best - self._min_delta:
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        self._stop_where_due(trainer)

    def _stop_where_due(self, trainer: Any) -> None:
        if self._bad >= self._patience:
            trainer.stop(f"{self._metric} has not improved on {self._best:.5g} in {self._bad} evaluations")
