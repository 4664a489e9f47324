"""The callback that evaluates; it calls `on_evaluate` of the other callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord
from jaxpp_flax.trainers.callbacks.log_metrics import LogMetrics
from jaxpp_flax.trainers.data.evaluation_sets import evaluation_sets

__all__ = ["Evaluate"]


class Evaluate(Callback):
    """Evaluates every `every` steps, and at the end if the last step had no evaluation; logs to `trainer.tracker`.

    Args:
      data: the data to evaluate, or a mapping of names to several sets; it must be possible to iterate over it several
        times.
      every: steps between two evaluations; None for one evaluation at the end.
      steps: the most batches of each set to evaluate; None evaluates all.
      global_batch_size: the number of examples in a batch of `data`: see `PipelineTrainer.evaluate`.

    Raises:
      TypeError, ValueError: as `PipelineTrainer.evaluate`.
    """

    def __init__(
        self,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        every: int | None = None,
        steps: int | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(every=1 if every is None else every)
        evaluation_sets("Evaluate: data", data, every=None if every is None else f"every={every}")
        self._steps = None if steps is None else check_count("Evaluate: steps", steps)
        self._data, self._global_batch_size, self._only_at_end = data, global_batch_size, every is None
        self._begin: int | None = None
        self.at_end = False
        """True once the evaluation after the last step has begun."""

    def wants(self, step: int) -> bool:
        return not self._only_at_end and super().wants(step)

    def on_fit_start(self, trainer: Any) -> None:
        self._begin, self.at_end = trainer.step, False

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, LogMetrics):  # the metrics of a step come before those of an evaluation
                callback.flush(trainer)
        self._evaluate(trainer)

    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        is_stopped_before_a_step = trainer.step == self._begin
        if error is None and not self.wants(trainer.step) and not is_stopped_before_a_step:
            self.at_end = True
            self._evaluate(trainer)

    def _evaluate(self, trainer: Any) -> None:
        step = trainer.step  # a callback may restore another one
        metrics = trainer.evaluate(self._data, steps=self._steps, global_batch_size=self._global_batch_size)
        named = {f"eval_{name}": value for name, value in metrics.items()}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items() if isinstance(value, float))
        trainer.message(f"step {step}  {shown}")
        trainer.guarded_tracker.log(named, step=step)
        for callback in trainer.callbacks:
            callback.on_evaluate(trainer, step, metrics)
