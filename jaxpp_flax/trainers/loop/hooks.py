"""What `fit` does after a step, in hooks over its record: metrics one step late, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.loop.progress import Meter, Rate
from jaxpp_flax.trainers.loop.steps import StepRecord, TrainerProtocol

__all__ = ["EvaluationHook", "MetricsHook", "to_host"]


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as floats (scalars) and NumPy arrays; waits for them."""
    return {name: _host(value) for name, value in metrics.items()}


def _host(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


class MetricsHook:
    """Delivers the metrics of a step to meter, tracker and callbacks once the next step is under way.

    Args:
      trainer: whose tracker gets them; callbacks get the trainer.
      callbacks: of `fit`.
      meter: shows them.
      log_every: steps between two rows.
      total: the number of the last step, where known.
    """

    def __init__(
        self, trainer: TrainerProtocol, callbacks: Sequence[Callback], meter: Meter, log_every: int, total: int | None
    ) -> None:
        self._trainer, self._callbacks, self._meter, self._log_every = trainer, callbacks, meter, log_every
        self._begin, self._total, self._rate = trainer.step, total, Rate(total)
        self._units = 0
        self._pending: tuple[StepRecord, int] | None = None  # with the units up to it
        self.last: dict[str, Any] = {}
        """The last metrics that were delivered, those of evaluations among them."""

    def __call__(self, record: StepRecord) -> None:
        """Deliver the metrics of the step before, and keep those of this one."""
        self._units += record.units
        self._deliver((record, self._units))

    def flush(self) -> None:
        """Deliver the metrics of the last step."""
        self._deliver(None)

    def add(self, named: Mapping[str, Any]) -> None:
        """Metrics of an evaluation: the time that it took is no part of the steps' rate."""
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
    """Evaluates every so many steps, and at the end where the last step was none of these.

    Args:
      trainer: evaluates.
      data: None for no evaluation.
      every: steps between two; None for one at the end.
      global_batch_size: of `data`, as in `fit`.
      metrics: delivers those of the steps before.
      callbacks: of `fit`.
      meter: shows the result.
      evaluated: is called after the callbacks of an evaluation.
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
        """Evaluate where it is time."""
        if self._data is not None and self._every is not None and record.step % self._every == 0:
            self._metrics.flush()
            self._evaluate(self._data)

    def end(self) -> None:
        """After the last step."""
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
