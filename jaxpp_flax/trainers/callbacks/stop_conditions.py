"""Callbacks that end `fit`: by a metric or a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord

__all__ = ["EarlyStopping", "TimeLimit"]


class EarlyStopping(Callback):
    """Ends `fit` when a metric has not improved in `patience` evaluations.

    Checkpoints keep the best value and the number of evaluations since: a resumed run continues to count, and a stopped
    run stays stopped. Without `resume=`, each `fit` starts to count from zero.

    Args:
      metric: the name of a metric of the evaluation; "loss" and "eval_loss" mean the same. With several sets of data,
        "<set>/loss".
      patience: the number of evaluations without improvement after which `fit` ends, at least 1.
      min_delta: a smaller change does not count as an improvement.
      mode: "min" if smaller values are better; "max" if larger values are, as for an accuracy.

    Raises:
      ValueError: if an argument has a value that does not fit; the message names the argument.
      KeyError: from `fit`, if the evaluation has no such metric.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__()
        patience = check_count("EarlyStopping: patience", patience)
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"EarlyStopping(min_delta={min_delta!r}): it must be a number of at least 0.")
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping(mode={mode!r}): it must be 'min' or 'max'.")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._sign = 1 if mode == "min" else -1
        self.set_state(None)

    def check_sets(self, sets: Sequence[str | None]) -> None:
        """Refuse a metric of none of these sets of data; the name of a single set is None.

        Raises:
          ValueError: the message has names that would do.
        """
        name, _, metric = self._metric.removeprefix("eval_").rpartition("/")
        if sets != [None] and name not in sets:
            choices = ", ".join(repr(f"{one}/{metric}") for one in sets)
            raise ValueError(
                f"EarlyStopping watches {self._metric!r}, but eval_data has the sets {', '.join(map(repr, sets))}. "
                f"Name the metric of one of them: {choices}."
            )

    def state_name(self) -> str:
        return f"{type(self).__name__}({self._metric})"

    def get_state(self) -> dict[str, Any]:
        return {"best": self._best, "bad": self._bad}

    def set_state(self, state: Any) -> None:
        worst = self._sign * math.inf
        self._best, self._bad = (worst, 0) if state is None else (float(state["best"]), int(state["bad"]))

    def on_fit_start(self, trainer: Any) -> None:
        self._stop_where_due(trainer)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        name = self._metric if self._metric in metrics else self._metric.removeprefix("eval_")
        if name not in metrics:
            raise KeyError(f"EarlyStopping watches {self._metric!r}; the evaluation has {', '.join(sorted(metrics))}.")
        value = float(metrics[name])
        if self._sign * (self._best - value) > self._min_delta:
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        self._stop_where_due(trainer)

    def _stop_where_due(self, trainer: Any) -> None:
        if self._bad >= self._patience:
            trainer.stop(f"{self._metric} has not improved on {self._best:.5g} in {self._bad} evaluations")


class TimeLimit(Callback):
    """Ends `fit` after the first step that ends later than `seconds` after its start.

    With several processes, all of them end as soon as the clock of one is over the limit.

    Raises:
      ValueError: if `seconds` is not above 0.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        if not seconds > 0:
            raise ValueError(f"TimeLimit({seconds!r}): it must be a number of seconds above 0.")
        self._seconds, self._start = seconds, math.inf

    def on_fit_start(self, trainer: Any) -> None:
        self._start = time.monotonic()

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        if time.monotonic() - self._start > self._seconds:
            trainer.stop(f"the time limit of {self._seconds:g} seconds")
