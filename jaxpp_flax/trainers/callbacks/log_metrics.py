"""The callback that logs rows of metrics to the tracker and the display, and calls `on_metrics` of the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax

from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.processes.waits import call_with_limit
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord, has_failed, overrides
from jaxpp_flax.trainers.metrics.run_metrics import stepping_seconds
from jaxpp_flax.trainers.metrics.summary import summarise_run
from jaxpp_flax.trainers.progress import Display, Rate

__all__ = ["LogMetrics", "configuration", "to_host"]

# After an error, the metrics of the last step may never come: a device hangs, or another process is gone. Another step
# under way takes less than the first number of seconds; what is ready needs less than the second one.
_PATIENCE, _AT_ONCE = 60.0, 1.0


@dataclass(frozen=True)
class _Row:
    """The metrics of a step that are not logged yet, with the units and the operations up to this step."""

    step: int
    metrics: Mapping[str, Any]
    units: int
    unit: str
    operations: float


class LogMetrics(Callback):
    """Logs the metrics of a step to `trainer.tracker` while the next step runs, so that devices never wait.

    There is a row for the first step, for each `Logging(every=)`-th step, and for the last step that ran, however the
    loop ends. The tracker gets the configuration first, and is closed last; its state goes into checkpoints. This
    callback calls `on_metrics` of the other callbacks. `fit` adds a `LogMetrics` by itself; for `training_steps`, pass
    `LogMetrics()` without arguments.

    Args:
      display: shows the rows and, at the end, a summary of the run.
      total: the number of the last step, if known, for the time left.
      ranking: the metric of the attribute `best`.
      directory: the directory of checkpoints, for the summary.
      hurries: returns True if the loop must not wait for metrics after Ctrl-C.
    """

    def __init__(
        self,
        *,
        display: Display | None = None,
        total: int | None = None,
        ranking: Best | None = None,
        directory: Path | None = None,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._display, self._total, self._ranking = display or Display.silent(), total, ranking
        self._directory, self._hurries = directory, hurries
        self._state: Any = None  # of the trackers, from a checkpoint
        self._tracker: Any = None
        self._listeners: Sequence[Callback] = ()
        self._reset()

    def _reset(self) -> None:
        self._begin: int | None = None
        self._rate, self._pending = Rate(None, lambda: 0.0), deque[_Row]()
        self.units, self.unit = 0, "examples"  # of all steps
        self.best: tuple[str, float, int] | None = None
        """The best value of the metric of `ranking`, with its name and step. Without `ranking`: the lowest `eval_loss`
        (of several sets, of the first one), or without evaluations the lowest logged `loss`."""
        self.last: dict[str, Any] = {}
        """The metrics that were logged last, with the metrics of evaluations."""

    def get_state(self) -> Any:
        return self._state if self._tracker is None else self._tracker.get_state()

    def set_state(self, state: Any) -> None:
        self._state, self._tracker = state, None

    def on_fit_start(self, trainer: Any) -> None:
        self._reset()
        self._begin, self._tracker = trainer.step, trainer.guarded_tracker
        measures = trainer.measures  # not the trainer, which keeps this callback for its state
        self._rate = Rate(self._total, lambda: stepping_seconds(measures.seconds()))
        self._listeners = [callback for callback in trainer.callbacks if overrides(callback, "on_metrics")]
        self._tracker.set_state(self._state or [], trainer.message)
        self._tracker.log_config({**configuration(trainer), **trainer.config})
        self._display.start(self._total, trainer.step)

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        self._display.advance(record.step)
        count, self.unit = trainer.measures.count(record.batch, record.global_batch_size)
        self.units += count
        self._pending.append(_Row(record.step, record.metrics, self.units, self.unit, trainer.measures.operations))
        if len(self._pending) > 1:
            self._deliver(trainer, is_last=False)

    def flush(self, trainer: Any) -> None:
        """Log the row of the latest step now, before an evaluation or the end of the loop."""
        if self._pending:
            self._deliver(trainer, is_last=True)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self.last = {**self.last, **{f"eval_{name}": value for name, value in metrics.items()}}
        first = next((name for name in metrics if name.endswith("/loss")), "loss")  # of several sets
        self._compare(f"eval_{first}", step)

    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not has_failed(error)):
            self.flush(trainer)
        else:
            self._log_what_is_left(trainer, error)

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        self._display.stop()
        if self._begin is not None and trainer.step > self._begin and not has_failed(error):
            seconds, units = trainer.measures.seconds(), (self.units, self.unit)
            steps = trainer.step - self._begin
            self._display.message(summarise_run(trainer.step, steps, seconds, units, self.best, self._directory))
        trainer.guarded_tracker.close(error)

    # ------------------------------------------------------------------ rows

    def _is_due(self, trainer: Any, step: int, *, is_last: bool) -> bool:
        return is_last or step % trainer.log_every == 0 or step == (self._begin or 0) + 1

    def _deliver(self, trainer: Any, *, is_last: bool) -> None:
        """Log the oldest row, and call the callbacks. The row stays if its metrics do not come."""
        row = self._pending[0]
        has_row = self._is_due(trainer, row.step, is_last=is_last)
        wanting = [callback for callback in self._listeners if callback.wants(row.step)]
        if not has_row and not wanting:
            self._pending.popleft()
            return
        with trainer.measures.clock.part("device"):
            metrics = to_host(row.metrics)
        self._pending.popleft()  # before it is logged, so that no tracker gets a row twice
        self._log(trainer, row, metrics, has_row=has_row)
        for callback in wanting:
            callback.on_metrics(trainer, row.step, self.last)

    def _log(self, trainer: Any, row: _Row, metrics: dict[str, Any], *, has_row: bool) -> None:
        self.last = metrics
        self._compare("loss", row.step)
        if has_row:
            rate, left = self._rate.read(row.step, row.units)
            self._display.update(row.step, metrics, rate, row.unit, left)
            extra = {} if rate is None else {f"{row.unit}_per_second": rate}
            measured = trainer.measures.row(row.step, row.operations)
            trainer.guarded_tracker.log({**metrics, **extra, **measured}, step=row.step)

    def _log_what_is_left(self, trainer: Any, error: BaseException) -> None:
        """Log the rows that are left. If their metrics do not come, the error gets a note.

        A callback may be the cause of the error, or meet other processes, which would not come: none is called.
        """
        at_once = isinstance(error, ProcessFailedError) or (isinstance(error, KeyboardInterrupt) and self._hurries())
        while self._pending:
            row = self._pending.popleft()
            if not self._is_due(trainer, row.step, is_last=not self._pending):
                continue
            try:
                metrics = _fetch_within(_AT_ONCE if at_once else _PATIENCE, row.metrics)
                self._log(trainer, row, metrics, has_row=True)
            except Exception as failed:
                steps = " and ".join(str(lost.step) for lost in (row, *self._pending))
                self._pending.clear()
                # An error of another process tells on many lines what the first error has told already.
                reason = str(failed).partition("\n")[0]
                text = f"The metrics of step {steps} are lost: {type(failed).__name__}: {reason}"
                if isinstance(error, GeneratorExit):  # nobody sees this error
                    trainer.message(text)
                error.add_note(text)

    def _compare(self, name: str, step: int) -> None:
        """Note a value that is better than those before; without a ranking, an evaluation counts more than a step."""
        ranking, best = self._ranking or Best(name), self.best
        value = self.last.get(ranking.best)
        if not isinstance(value, float) or not math.isfinite(value):
            return
        if self._ranking is None and best is not None and best[0].startswith("eval_") and name == "loss":
            return
        if best is None or best[0] != ranking.best or ranking.order(value) > ranking.order(best[1]):
            self.best = (ranking.best, value, step)


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


def configuration(trainer: Any) -> dict[str, Any]:
    """Return facts about a trainer's run, by name.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineTrainer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: model(x).mean(),
      ...                           num_stages=1, num_microbatches=2, logging=False)
      >>> {name: value for name, value in configuration(trainer).items() if name.startswith("num_")}
      {'num_stages': 1, 'num_microbatches': 2, 'num_processes': 1}
    """
    mesh = trainer.mesh
    return {
        "num_stages": trainer.num_stages,
        "num_microbatches": trainer.num_microbatches,
        "schedule": None if trainer.schedule is None else repr(trainer.schedule),
        "mesh": None if mesh is None else dict(mesh.jax_mesh.shape),
        "num_processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": {package.__name__: package.__version__ for package in (jax, flax, optax)},
    }
