"""The training loop of `fit`: dispatch a step, then deliver the metrics of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_flax.processes import ProcessGroup, process_group
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.data.batch import count_units
from jaxpp_flax.trainers.loop.interruption import Interruption
from jaxpp_flax.trainers.loop.preemption import Preemption
from jaxpp_flax.trainers.loop.progress import Meter, Rate
from jaxpp_flax.trainers.loop.stopping import CommonStop, StopReason

__all__ = ["run_fit", "to_host"]


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as floats (scalars) and NumPy arrays; waits for them."""
    return {name: _host(value) for name, value in metrics.items()}


def _host(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


def run_fit(
    trainer: Any,
    source: Iterable[Any],
    total: int | None,
    *,
    eval_data: Iterable[Any] | None,
    eval_every: int | None,
    callbacks: Sequence[Callback],
    meter: Meter,
    log_every: int,
    global_batch_size: int | None = None,
    eval_global_batch_size: int | None = None,
    first: Callable[[Any], None] = lambda _: None,
) -> dict[str, Any]:
    """Train on every batch of `source`; returns the last metrics (of the evaluation too, as `eval_...`).

    `first` is called with the first batch, before anything is compiled.
    """
    sizes = (global_batch_size, eval_global_batch_size)
    return _FitLoop(trainer, total, eval_data, eval_every, callbacks, meter, log_every, sizes, first).run(source)


class _FitLoop:
    def __init__(
        self,
        trainer: Any,
        total: int | None,
        eval_data: Iterable[Any] | None,
        eval_every: int | None,
        callbacks: Sequence[Callback],
        meter: Meter,
        log_every: int,
        global_batch_sizes: tuple[int | None, int | None],
        first: Callable[[Any], None],
    ) -> None:
        self.trainer, self.eval_data, self.eval_every = trainer, eval_data, eval_every
        self.callbacks, self.meter, self.log_every = callbacks, meter, log_every
        self.global_batch_size, self.eval_global_batch_size = global_batch_sizes
        self.first = first
        self.begin = trainer.step
        self.total = None if total is None else self.begin + total
        self.rate = Rate(self.total)
        self.units, self.unit = 0, "examples"
        self.pending: tuple[int, int, Mapping[str, Any]] | None = None
        self.last: dict[str, Any] = {}
        self.ending: StopReason | None = None
        # One process of several may train a model of its own, without the others.
        alone = not trainer._is_across and trainer._store is None
        self.group = ProcessGroup(None, 0, 1) if alone else process_group()
        self.common_stop = CommonStop(self.group)
        self.interruption = Interruption(raises=self.group.process_count == 1)
        self.preemption = Preemption(trainer._preemption_deadline)

    def run(self, source: Iterable[Any]) -> dict[str, Any]:
        with self.interruption, self.preemption:
            try:
                last = self._run(source)
            except BaseException as error:
                self.trainer._finish_saves(error)
                if isinstance(error, KeyboardInterrupt):
                    alone = self.group.process_count == 1
                    self.trainer._save_interrupted(error, whole=not self.interruption.within_step, together=alone)
                raise
            # The data may have ended before the step that was agreed on.
            asked = self.common_stop.decide(self.requested() if self.ending is None else self.ending)
            if asked is not None and asked.kind == "interrupted":
                interrupted = KeyboardInterrupt()
                self.trainer._save_interrupted(interrupted, whole=True, together=True)
                raise interrupted
            preempted = asked is not None and asked.kind == "preempted"
            self.trainer._end_fit(lambda: preempted or self.preemption.requested)
        return last

    def requested(self) -> StopReason | None:
        """Why this process has been asked to end."""
        if self.preemption.requested:
            return StopReason("preempted")
        if self.interruption.requested:
            return StopReason("interrupted")
        stopping = self.trainer.stopping
        return None if stopping is None else StopReason("stopped", stopping)

    def decide_together(self) -> None:
        """Where all processes come at the same time, what one of them has decided holds for all, at once."""
        self.ending = self.common_stop.decide(self.requested())

    def _run(self, source: Iterable[Any]) -> dict[str, Any]:
        trainer, started = self.trainer, False
        try:
            for batch in source:
                if not started:
                    self.first(batch)
                    trainer.compile(batch, global_batch_size=self.global_batch_size)
                    for callback in self.callbacks:
                        callback.on_fit_start(trainer)
                    self.meter.start(self.total, self.begin)
                    started = True
                    self.decide_together()
                    if self.ending is not None and self.ending.kind == "stopped":
                        trainer.stopping = self.ending.text
                        self.meter.message(f"nothing to do after step {trainer.step}: {self.ending.text}")
                        return self.last
                if self.ending is None:
                    self.step(batch)
                    trainer._after_step()
                    if self.ending is None:
                        self.ending = self.common_stop.after(trainer.step, self.requested())
                if self.ending is not None:
                    break
            self.deliver(None)
            if self.ending is not None:
                if self.ending.kind != "stopped":
                    return self.last
                trainer.stopping = self.ending.text
                self.meter.message(f"stopped after step {trainer.step}: {self.ending.text}")
            trainer._end_together()
            if self.eval_data is not None and (self.eval_every is None or trainer.step % self.eval_every):
                self.evaluate()
        finally:
            self.meter.stop()
            if started:
                for callback in self.callbacks:
                    callback.on_fit_end(trainer)
        return self.last

    def step(self, batch: Any) -> None:
        trainer = self.trainer
        with self.interruption.step():
            metrics = trainer.train_step(batch, global_batch_size=self.global_batch_size)
        step = trainer.step
        units, self.unit = count_units(trainer._whole(batch, self.global_batch_size))
        self.units += units
        self.meter.advance(step)
        for callback in self.callbacks:
            if callback.wants(step):
                callback.on_step(trainer, step)
        self.deliver((step, self.units, metrics))
        if self.eval_every is not None and self.eval_data is not None and step % self.eval_every == 0:
            self.deliver(None)
            self.evaluate()

    def logs(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.begin + 1 or step == self.total

    def deliver(self, new: tuple[int, int, Mapping[str, Any]] | None) -> None:
        """Fetch the metrics that are pending, now that the next step is under way, and put `new` in their place."""
        pending, self.pending = self.pending, new
        if pending is None:
            return
        step, units, metrics = pending
        wanting = [callback for callback in self.callbacks if callback.wants(step)]
        if not self.logs(step) and new is not None and not any(_overrides_metrics(c) for c in wanting):
            return
        self.last = to_host(metrics)
        if self.logs(step) or new is None:
            rate, left = self.rate.read(step, units)
            self.meter.update(step, self.last, rate, self.unit, left)
            extra = {} if rate is None else {f"{self.unit}_per_second": rate}
            self.trainer.tracker.log({**self.last, **extra}, step=step)
        for callback in wanting:
            callback.on_metrics(self.trainer, step, self.last)

    def evaluate(self) -> None:
        trainer = self.trainer
        if self.eval_data is None:
            return
        metrics = trainer.evaluate(self.eval_data, global_batch_size=self.eval_global_batch_size)
        named = {f"eval_{name}": value for name, value in metrics.items()}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items() if isinstance(value, float))
        self.meter.message(f"step {trainer.step}  {shown}")
        trainer.tracker.log(named, step=trainer.step)
        for callback in self.callbacks:
            callback.on_evaluate(trainer, trainer.step, metrics)
        if self.ending is None:
            self.decide_together()
        self.last = {**self.last, **named}
        self.rate.resume(self.units)


def _overrides_metrics(callback: Callback) -> bool:
    return type(callback).on_metrics is not Callback.on_metrics
