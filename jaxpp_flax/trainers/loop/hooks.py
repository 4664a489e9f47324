"""The steps of a training loop, and hooks: functions of a step's record. The hooks here log metrics, and evaluate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.processes.waits import call_with_limit
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.data.batch import count_units
from jaxpp_flax.trainers.loop.progress import Meter, Rate
from jaxpp_flax.trainers.loop.trackers import Tracker
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics, stepping_seconds

__all__ = [
    "Evaluate", "LogMetrics", "LoopHook", "StepHook", "StepRecord", "TrainerProtocol", "check_hooks", "leave_hooks",
    "overrides", "run_steps", "to_host",
]  # fmt: skip

# After an error, the metrics of the last step may never come: a device hangs, or another process is gone. Another step
# under way takes less than the first number of seconds; what is ready needs less than the second one.
_PATIENCE, _AT_ONCE = 60.0, 1.0


@dataclass(frozen=True)
class _Row:
    """The metrics of a step that are not logged yet, with the number of units up to this step."""

    step: int
    metrics: Mapping[str, Any]
    units: int
    unit: str


@dataclass(frozen=True)
class StepRecord:
    """A step that was dispatched.

    Args:
      step: the number of the step, from 1.
      metrics: values that may not be ready yet, at least `loss`.
      batch: the batch of the step: the whole batch, or this process's rows.
      global_batch_size: the number of examples in the whole batch, if `batch` has only this process's rows.
    """

    step: int
    metrics: Mapping[str, Any]
    batch: Any
    global_batch_size: int | None = None

    def count_units(self) -> tuple[int, str]:
        """Return the number of tokens or examples in the whole batch, and the word "tokens" or "examples".

        Example:
          >>> StepRecord(1, {"loss": 0.5}, np.zeros((4, 8))).count_units()
          (4, 'examples')
        """
        return count_units(self.batch, self.global_batch_size)


StepHook = Callable[[StepRecord], None]
"""A function that is called after each step, before the next batch is drawn. It may be a `LoopHook`."""


class LoopHook:
    """A hook with work after the last step, too.

    Example:
      >>> class Mean(LoopHook):
      ...     total = count = 0
      ...     def __call__(self, record):
      ...         self.total, self.count = self.total + record.metrics["loss"], self.count + 1
      ...     def end(self):
      ...         print(float(self.total / self.count))
    """

    def __call__(self, record: StepRecord) -> None:
        """Do the work after a step."""

    @property
    def is_due_at_end(self) -> bool:
        """True if `end` has work after the latest step."""
        return False

    def end(self) -> None:
        """Do the work after the last step; not called after an error, or a `break` in the user's loop."""

    def leave(self, error: BaseException, *, at_once: bool = False) -> None:
        """Do the work, in place of `end`, after an error, Ctrl-C or a `break` (`GeneratorExit`); it must not raise.

        Args:
          at_once: True if nothing that is under way may be waited for.
        """


class TrainerProtocol(Protocol):
    """The attributes of the trainer that a loop, its hooks and its callbacks use."""

    tracker: Tracker
    log_every: int
    stopping: str | None

    @property
    def measures(self) -> RunMetrics: ...
    @property
    def step(self) -> int: ...
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any: ...
    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]: ...
    def evaluate(self, data: Iterable[Any], *, global_batch_size: int | None = None) -> dict[str, Any]: ...
    def message(self, text: str) -> None: ...


def run_steps(
    trainer: TrainerProtocol,
    source: Iterable[Any],
    global_batch_size: int | None,
    hooks: Sequence[StepHook],
    *,
    begin: Callable[[Any], bool],
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[StepRecord]:
    """Train on every batch of `source`, and call the hooks; a step runs when the consumer asks for its record.

    Args:
      begin: called with the first batch, before its step; False ends the loop without a step.
      within: makes the context manager to enter around each step.
    """
    for number, batch in enumerate(source):
        if not number and not begin(batch):
            return
        with within():
            metrics = trainer.train_step(batch, global_batch_size=global_batch_size)
        record = StepRecord(trainer.step, metrics, batch, global_batch_size)
        for hook in hooks:
            hook(record)
        yield record


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for metrics, and return them as floats (scalars) and NumPy arrays."""
    arrays = {name: np.asarray(value) for name, value in metrics.items()}
    return {name: float(array) if array.ndim == 0 else array for name, array in arrays.items()}


def _fetch_within(seconds: float, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as `to_host` does; raise `TimeoutError` if they are not ready after so many seconds."""
    found: list[dict[str, Any]] = []
    errors: list[Exception] = []

    def fetch() -> None:
        try:
            found.append(to_host(metrics))
        except Exception as error:
            errors.append(error)

    call_with_limit(fetch, seconds)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"the devices have not computed them after {seconds:g} s")
    return found[0]


class LogMetrics(LoopHook):
    """Logs the metrics of a step to `trainer.tracker`, once the next step is under way: devices never wait for it.

    The first step, the last one, and every `Logging(every=)` steps have a row. The last one is the last one that was
    taken, however the loop ends: its end, an error, Ctrl-C, SIGTERM or a `break`. After an error, Ctrl-C or a `break`
    the last rows are logged without a call of `on_metrics`.

    Args:
      trainer: the trainer of the loop.
      callbacks: their `on_metrics` is called for each step that they want.
      total: the number of the last step, if known, for the time left.
      meter: shows the rows; the caller starts and stops it.
      ranking: the metric of `best`.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        *,
        callbacks: Sequence[Callback] = (),
        total: int | None = None,
        meter: Meter | None = None,
        ranking: Best | None = None,
    ) -> None:
        self._trainer, self.callbacks, self._meter, self._ranking = trainer, callbacks, meter or Meter(), ranking
        self._first, self._rate = trainer.step + 1, Rate(total, lambda: stepping_seconds(trainer.measures.seconds()))
        self.units, self.unit = 0, "examples"  # of all steps
        self.best: tuple[str, float, int] | None = None
        """The best value of the metric of `ranking`, with its name and step. Without `ranking`: the lowest `eval_loss`,
        or without evaluations the lowest logged `loss`."""
        self._pending = deque[_Row]()
        self.last: dict[str, Any] = {}
        """The metrics that were logged last, with the metrics of evaluations."""

    def __call__(self, record: StepRecord) -> None:
        count, self.unit = self._trainer.measures.count(record.batch, record.global_batch_size)
        self.units += count
        self._pending.append(_Row(record.step, record.metrics, self.units, self.unit))
        if len(self._pending) > 1:
            self._deliver(is_last=False)

    def end(self) -> None:
        if self._pending:
            self._deliver(is_last=True)

    def leave(self, error: BaseException, *, at_once: bool = False) -> None:
        """Log the rows that are left. If their metrics do not come, the error gets a note.

        A callback may be the cause of the error, or meet other processes, which would not come: none is called.
        """
        wait_s = _AT_ONCE if at_once or isinstance(error, ProcessFailedError) else _PATIENCE
        while self._pending:
            row = self._pending.popleft()
            if not self._is_due(row.step, is_last=not self._pending):
                continue
            try:
                self._log(row, _fetch_within(wait_s, row.metrics), has_row=True)
            except Exception as failed:
                steps = " and ".join(str(lost.step) for lost in (row, *self._pending))
                self._pending.clear()
                # An error of another process tells on many lines what the first error has told already.
                reason = str(failed).partition("\n")[0]
                _note(self._trainer, error, f"The metrics of step {steps} are lost: {type(failed).__name__}: {reason}")

    def add(self, named: Mapping[str, Any]) -> None:
        """Add the metrics of an evaluation."""
        self.last = {**self.last, **named}
        self._compare("eval_loss", self._trainer.step)

    def _is_due(self, step: int, *, is_last: bool) -> bool:
        return is_last or step % self._trainer.log_every == 0 or step == self._first

    def _deliver(self, *, is_last: bool) -> None:
        """Log the oldest row, and call the callbacks. The row stays if its metrics do not come."""
        row = self._pending[0]
        has_row = self._is_due(row.step, is_last=is_last)
        wanting = [callback for callback in self.callbacks if callback.wants(row.step)]
        if not has_row and not any(overrides(callback, "on_metrics") for callback in wanting):
            self._pending.popleft()
            return
        with self._trainer.measures.clock.part("device"):
            metrics = to_host(row.metrics)
        self._pending.popleft()  # before it is logged, so that no tracker gets a row twice
        self._log(row, metrics, has_row=has_row)
        for callback in wanting:
            callback.on_metrics(self._trainer, row.step, self.last)

    def _log(self, row: _Row, metrics: dict[str, Any], *, has_row: bool) -> None:
        self.last = metrics
        self._compare("loss", row.step)
        if has_row:
            rate, left = self._rate.read(row.step, row.units)
            self._meter.update(row.step, metrics, rate, row.unit, left)
            extra = {} if rate is None else {f"{row.unit}_per_second": rate}
            self._trainer.tracker.log({**metrics, **extra, **self._trainer.measures.row(row.step)}, step=row.step)

    def _compare(self, name: str, step: int) -> None:
        """Note a value that is better than those before; without a ranking, an evaluation counts more than a step."""
        ranking, best = self._ranking or Best(name), self.best
        value = self.last.get(ranking.best)
        if not isinstance(value, float) or not math.isfinite(value):
            return
        if self._ranking is None and best is not None and best[0] == "eval_loss" != name:
            return
        if best is None or best[0] != ranking.best or ranking.order(value) > ranking.order(best[1]):
            self.best = (ranking.best, value, step)


class Evaluate(LoopHook):
    """Evaluates every `every` steps, and at the end if the last step had no evaluation; logs to `trainer.tracker`.

    Args:
      trainer: the trainer of the loop.
      data: the data to evaluate, which can be iterated again.
      every: steps between two evaluations; None for one evaluation at the end.
      global_batch_size: the number of examples in a batch of `data`: see `PipelineTrainer.evaluate`.
      log: the hook of the steps' metrics, which come before those of an evaluation.
      callbacks: their `on_evaluate` is called after each evaluation.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        data: Iterable[Any],
        *,
        every: int | None = None,
        global_batch_size: int | None = None,
        log: LogMetrics | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._trainer, self._data, self._every, self._global_batch_size = trainer, data, every, global_batch_size
        self._log, self.callbacks = log, callbacks

    def __call__(self, record: StepRecord) -> None:
        if self._every is not None and record.step % self._every == 0:
            if self._log is not None:
                self._log.end()
            self._evaluate()

    @property
    def is_due_at_end(self) -> bool:
        return self._every is None or self._trainer.step % self._every != 0

    def end(self) -> None:
        if self.is_due_at_end:
            self._evaluate()

    def _evaluate(self) -> None:
        trainer = self._trainer
        metrics = trainer.evaluate(self._data, global_batch_size=self._global_batch_size)
        named = {f"eval_{name}": value for name, value in metrics.items()}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items() if isinstance(value, float))
        trainer.message(f"step {trainer.step}  {shown}")
        trainer.tracker.log(named, step=trainer.step)
        for callback in self.callbacks:
            callback.on_evaluate(trainer, trainer.step, metrics)
        if self._log is not None:
            self._log.add(named)


def leave_hooks(hooks: Sequence[StepHook], trainer: TrainerProtocol, error: BaseException) -> None:
    """Call `leave` of each `LoopHook`; an error of one becomes a note of `error`, and keeps no other from its end."""
    for hook in hooks:
        if isinstance(hook, LoopHook):
            try:
                hook.leave(error)
            except Exception as failed:
                _note(trainer, error, f"{type(hook).__name__}.leave failed as well: {failed!r}")


def _note(trainer: TrainerProtocol, error: BaseException, text: str) -> None:
    if isinstance(error, GeneratorExit):  # nobody sees this error
        trainer.message(text)
    error.add_note(text)


def check_hooks(hooks: Sequence[StepHook]) -> None:
    """Raise a `TypeError` for a hook that is not a function, a `ValueError` for a callback with work in `fit` alone."""
    for hook in hooks:
        if not callable(hook):
            raise TypeError(
                f"hooks holds a {type(hook).__name__}; a hook is a function of a StepRecord. Pass callbacks to "
                "LogMetrics(trainer, callbacks=[...])."
            )
        for callback in getattr(hook, "callbacks", ()):
            if isinstance(callback, Callback) and not overrides(callback, "on_metrics", "on_evaluate"):
                raise ValueError(
                    f"a hook holds a {type(callback).__name__}, which works in on_fit_start, on_step and on_fit_end: "
                    "only `fit` calls these. Use `fit`, or call its methods in your loop."
                )


def overrides(callback: Callback, *hooks: str) -> bool:
    """Return True if a callback's class defines one of these hooks itself."""
    return any(getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks)
