"""Callbacks: small classes with hooks that `fit` calls during training, and their states in checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["Callback", "CallbackStates", "EarlyStopping", "OnMetrics", "PrintLoss", "StopOnFile", "TimeLimit"]


class Callback:
    """Hooks into `fit`; override the hooks you need.

    Args:
      every: steps between two calls of the hooks of a step (`on_step`, `on_metrics`).

    Raises:
      ValueError: if `every` is below 1.

    Example:
      >>> class Remember(Callback):
      ...     def on_metrics(self, trainer, step, metrics):
      ...         self.last = (step, metrics["loss"])
      >>> Remember(every=10).wants(20)
      True
    """

    def __init__(self, *, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{type(self).__name__}(every={every!r}): it must be a whole number of at least 1.")
        self.every = every

    def wants(self, step: int) -> bool:
        """Return True if the hooks run at `step`."""
        return step % self.every == 0

    def get_state(self) -> Any:
        """Return this callback's state for a checkpoint, as JSON; None for no state."""
        return None

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, or begin again with None. `fit` calls this before `on_fit_start`."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called before the first step; `trainer.stop` here ends `fit` without a step."""

    def on_step(self, trainer: Any, step: int) -> None:
        """Called right after `step` was dispatched: `trainer.state` is the state after `step`, without a wait."""

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called with the metrics of `step` on the host, one step late, so that devices never wait for metrics."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation at `step`."""

    def on_fit_end(self, trainer: Any) -> None:
        """Called after the last step, and after an error or interruption too."""


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Name callbacks by class, with a number if a class occurs several times: another run gives the same names.

    Example:
      >>> list(named([OnMetrics(print), OnMetrics(print), Callback()]))
      ['OnMetrics', 'OnMetrics_2', 'Callback']
    """
    found: dict[str, Callback] = {}
    count = Counter[str]()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        found[name if count[name] == 1 else f"{name}_{count[name]}"] = callback
    return found


class OnMetrics(Callback):
    """Calls a function with `(step, metrics)`.

    Example:
      >>> losses = {}
      >>> callback = OnMetrics(lambda step, metrics: losses.update({step: metrics["loss"]}), every=5)
    """

    def __init__(self, function: Callable[[int, Mapping[str, Any]], None], *, every: int = 1) -> None:
        super().__init__(every=every)
        self._function = function

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self._function(step, metrics)


class PrintLoss(Callback):
    """Prints a line such as `step 20  loss 2.34567`, every `every` steps."""

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        trainer.message(f"step {step}  loss {metrics['loss']:.5f}")


class EarlyStopping(Callback):
    """Ends `fit` when a metric has not improved in `patience` evaluations.

    Checkpoints keep the best value and the number of evaluations since: a resumed run continues to count, and a stopped
    run stays stopped. Without `resume=`, each `fit` begins to count again.

    Args:
      metric: the name of the metric.
      patience: evaluations without improvement, at least 1.
      min_delta: the smallest change that counts as an improvement.
      mode: "min" if smaller is better, "max" if larger is, as of an accuracy.

    Raises:
      ValueError: naming the argument that does not fit.
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
        if patience < 1:
            raise ValueError(f"EarlyStopping(patience={patience}): it must be at least 1.")
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping(mode={mode!r}): it must be 'min' or 'max'.")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._sign = 1 if mode == "min" else -1
        self.set_state(None)

    def get_state(self) -> dict[str, Any]:
        return {"best": self._best, "bad": self._bad}

    def set_state(self, state: Any) -> None:
        worst = self._sign * math.inf
        self._best, self._bad = (worst, 0) if state is None else (float(state["best"]), int(state["bad"]))

    def on_fit_start(self, trainer: Any) -> None:
        self._stop_where_due(trainer)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        if self._metric not in metrics:
            raise KeyError(f"EarlyStopping watches {self._metric!r}; the evaluation has {', '.join(sorted(metrics))}.")
        value = float(metrics[self._metric])
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

    With several processes, the clock of the first one that is over the limit decides for all.

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

    def on_step(self, trainer: Any, step: int) -> None:
        if time.monotonic() - self._start > self._seconds:
            trainer.stop(f"the time limit of {self._seconds:g} seconds")


class StopOnFile(Callback):
    """Ends `fit` after a step if a file exists: `touch run/stop` ends a run from outside. The file stays.

    Args:
      path: the path of the file, on any of the processes.
      every: steps between two looks.

    Raises:
      FileExistsError: if the file is there when `fit` starts.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 10) -> None:
        super().__init__(every=every)
        self._path = Path(path)

    def on_fit_start(self, trainer: Any) -> None:
        if self._path.exists():
            raise FileExistsError(f"StopOnFile: {self._path} exists before the first step. Delete it to train.")

    def on_step(self, trainer: Any, step: int) -> None:
        if self._path.exists():
            trainer.stop(f"the file {self._path} exists")


class CallbackStates:
    """The states of the callbacks of the last `fit`, with names that are equal in another run.

    Example:
      >>> from jaxpp_flax.trainers.callbacks import EarlyStopping
      >>> states = CallbackStates()
      >>> states.begin([EarlyStopping(), Callback()], resumed=False)
      >>> states.to_json()
      {'EarlyStopping': {'best': inf, 'bad': 0}}
    """

    def __init__(self) -> None:
        self._callbacks: Sequence[Callback] = ()
        self._restored: Mapping[str, Any] | None = None

    def restored(self, states: Mapping[str, Any] | None) -> None:
        """Note the states from the checkpoint that a run resumes from; None without a checkpoint."""
        self._restored = states

    def begin(self, callbacks: Sequence[Callback], *, resumed: bool) -> None:
        """Reset each callback, or restore its state from the checkpoint; without a checkpoint, keep its state."""
        states = self._restored if resumed else {}
        for name, callback in named(callbacks).items():
            callback.set_state(callback.get_state() if states is None else states.get(name))
        self._callbacks = callbacks

    def to_json(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one."""
        states = {name: callback.get_state() for name, callback in named(self._callbacks).items()}
        return {name: state for name, state in states.items() if state is not None}
