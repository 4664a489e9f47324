"""The hooks of `fit` after each step: deliver metrics one step late, and run evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.loop.progress import Meter, Rate
from jaxpp_flax.trainers.loop.steps import StepRecord, TrainerProtocol

__all__ = ["EvaluationHook", "MetricsHook", "to_host"]


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for metrics, and return them as floats (scalars) and NumPy arrays."""
    return {name: _host(value) for name, value in metrics.items()}


def _host(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


class MetricsHook:
    """Delivers the metrics of a step to meter, tracker and callbacks once the next step is under way.

    Args:
      trainer: the trainer's tracker gets the metrics; callbacks get the trainer.
      callbacks: the callbacks of `fit`.
      meter: shows the metrics.
      log_every: steps between two rows.
      total: the number of the last step, if known.
    """

    def __init__(
        self, trainer: TrainerProtocol, callbacks: Sequence[Callback], meter: Meter, log_every: int, total: int | None
    ) -> None:
        self._trainer, self._callbacks, self._meter, self._log_every = trainer, callbacks, meter, log_every
        self._begin, self._total, self._rate = trainer.step, total, Rate(total)
        self._units = 0
        self._pending: tuple[StepRecord, int] | None = None  # a step, and the units up to this step
        self.last: dict[str, Any] = {}
        """The last delivered metrics, with the metrics of evaluations."""

    def __call__(self, record: StepRecord) -> None:
        """Deliver the metrics of the step before, and keep the metrics of this step."""
        self._units += record.units
        self._deliver((record, self._units))

    def flush(self) -> None:
        """Deliver the metrics of the last step."""
        self._deliver(None)

    def add(self, named: Mapping[str, Any]) -> None:
        """Add the metrics of an evaluation; the rate of the steps does not include the evaluation's time."""
        self.last = {**self.last, **named}
        self._rate.resume(self._units)

    def _deliver(self, new: tuple[StepRecord, int] | None) -> None:
        pending, self._pending = self._pending, new
        if pending is None:
            return
        record, units = pending
        step = record.step
        wanting = [callback for callback in self._callbacks if callback.wants(step)]
        if not self._logs(step) and new is not None and not any(_overrides_metrics(c) for c in wanting):
            return
        self.last = to_host(record.metrics)
        if self._logs(step) or new is None:
            rate, left = self._rate.read(step, units)
            self._meter.update(step, self.last, rate, record.unit, left)
            extra = {} if rate is None else {f"{record.unit}_per_second": rate}
            self._trainer.tracker.log({**self.last, **extra}, step=step)
        for callback in wanting:
            callback.on_metrics(self._trainer, step, self.last)

    def _logs(self, step: int) -> bool:
        return step % self._log_every == 0 or step == self._begin + 1 or step == self._total


class EvaluationHook:
    """Evaluates every `every` steps, and at the end if the last step had no evaluation.

    Args:
      trainer: runs the evaluation.
      data: the data to evaluate; None for no evaluation.
      every: steps between two evaluations; None for one evaluation at the end.
      global_batch_size: the batch size of `data`, as in `fit`.
      metrics: delivers the metrics of the steps before.
      callbacks: the callbacks of `fit`.
      meter: shows the result.
      evaluated: called after the callbacks of an evaluation.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        data: Iterable[Any] | None,
        every: int | None,
        global_batch_size: int | None,
        *,
        metrics: MetricsHook,
        callbacks: Sequence[Callback],
        meter: Meter,
        evaluated: Callable[[], None],
    ) -> None:
        self._trainer, self._data, self._every, self._global_batch_size = trainer, data, every, global_batch_size
        self._metrics, self._callbacks, self._meter, self._evaluated = metrics, callbacks, meter, evaluated

    def __call__(self, record: StepRecord) -> None:
        """Evaluate if an evaluation is due."""
        if self._data is not None and self._every is not None and record.step % self._every == 0:
            self._metrics.flush()
            self._evaluate(self._data)

    def end(self) -> None:
        """Evaluate after the last step, if due."""
        if self._data is not None and (self._every is None or self._trainer.step % self._every):
            self._evaluate(self._data)

    def _evaluate(self, data: Iterable[Any]) -> None:
        trainer = self._trainer
        metrics = trainer.evaluate(data, global_batch_size=self._global_batch_size)
        named = {f"eval_{name}": value for name, value in metrics.items()}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items() if isinstance(value, float))
        self._meter.message(f"step {trainer.step}  {shown}")
        trainer.tracker.log(named, step=trainer.step)
        for callback in self._callbacks:
            callback.on_evaluate(trainer, trainer.step, metrics)
        self._evaluated()
        self._metrics.add(named)


def _overrides_metrics(callback: Callback) -> bool:
    return type(callback).on_metrics is not Callback.on_metrics
