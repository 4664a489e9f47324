"""The training loop of `fit`: one step after another, and after each step the hooks in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.checkpoints import Resume, check_resume
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.position import ResumeData
from jaxpp_flax.trainers.data.remainder import Remainder
from jaxpp_flax.trainers.ending.end_of_fit import Ending
from jaxpp_flax.trainers.ending.interruption import Interruption
from jaxpp_flax.trainers.ending.preemption import Preemption
from jaxpp_flax.trainers.loop.hooks import EvaluationHook, MetricsHook
from jaxpp_flax.trainers.loop.progress import Meter
from jaxpp_flax.trainers.loop.saving import Saving
from jaxpp_flax.trainers.loop.steps import StepHook, StepRecord, TrainerProtocol, steps_of
from jaxpp_flax.trainers.setup import check_count

__all__ = ["FitArguments", "FitLoop"]


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The checked arguments of `PipelineTrainer.fit`, without the data; see their description there.

    Raises:
      TypeError, ValueError: the message names the argument that does not fit.
    """

    steps: int | None
    epochs: int | None
    global_batch_size: int | None
    remainder: Remainder | None
    eval_data: Iterable[Any] | None
    eval_every: int | None
    eval_global_batch_size: int | None
    callbacks: Sequence[Callback]
    resume: Resume
    resume_data: ResumeData

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks holds a {type(callback).__name__}; subclass jaxpp_flax.trainers.Callback, or wrap a "
                    "function: OnMetrics(function, every=10)."
                )
        check_resume(self.resume)
        if self.eval_every is not None:
            check_count("eval_every", self.eval_every)
        if self.eval_data is not None and self.eval_every is not None and iter(self.eval_data) is self.eval_data:
            raise ValueError(
                f"eval_every={self.eval_every} needs eval_data that can be iterated again, but a "
                f"{type(self.eval_data).__name__} runs once. Pass a list."
            )


class FitLoop:
    """One run of `fit` over batches.

    Args:
      trainer: takes the steps; callbacks get it.
      rows: the examples that this process loads.
      saving: saves to the trainer's directory of checkpoints.
      arguments: the arguments of `fit`.
      total: the number of steps to take, if known.
      meter: shows the progress.
      log_every: steps between two rows of metrics.
      deadline: seconds from SIGTERM to the end; None does not handle the signal.
      first: called with the first batch, before anything is compiled.
      await_same_end: waits, after the last step, until every process has taken the same number of steps.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        rows: BatchSharding,
        saving: Saving,
        arguments: FitArguments,
        total: int | None,
        *,
        meter: Meter,
        log_every: int,
        deadline: float | None,
        first: Callable[[Any], None],
        await_same_end: Callable[[], None],
    ) -> None:
        self._trainer, self._saving, self._arguments = trainer, saving, arguments
        self._meter, self._first, self._await_same_end = meter, first, await_same_end
        self._begin = trainer.step
        self._total = None if total is None else self._begin + total
        # With several processes, one process may train its own model, without the others.
        alone = not rows.is_across and not saving.has_directory
        group = ProcessGroup(None, 0, 1) if alone else process_group()
        self._is_alone = group.process_count == 1
        self._interruption = Interruption(raises=self._is_alone)
        self._preemption = Preemption(deadline)
        self._ending = Ending(trainer, group, self._interruption, self._preemption)
        self._metrics = MetricsHook(trainer, arguments.callbacks, meter, log_every, self._total)
        self._evaluation = EvaluationHook(
            trainer,
            arguments.eval_data,
            arguments.eval_every,
            arguments.eval_global_batch_size,
            metrics=self._metrics,
            callbacks=arguments.callbacks,
            meter=meter,
            evaluated=self._ending.decide_together,
        )

    def run(self, source: Iterable[Any]) -> dict[str, Any]:
        """Train on every batch of `source`; return the last metrics (of the evaluation too, as `eval_...`)."""
        with self._interruption, self._preemption:
            try:
                self._train(source)
            except BaseException as error:
                self._saving.finish(error)
                if isinstance(error, KeyboardInterrupt):
                    whole = not self._interruption.within_step
                    self._saving.interrupted(error, whole=whole, together=self._is_alone)
                raise
            asked = self._ending.after_last_step()
            if asked is not None and asked.kind == "interrupted":
                interrupted = KeyboardInterrupt()
                self._saving.interrupted(interrupted, whole=True, together=True)
                raise interrupted
            preempted = asked is not None and asked.kind == "preempted"
            self._saving.end(lambda: preempted or self._preemption.requested)
        return self._metrics.last

    def _train(self, source: Iterable[Any]) -> None:
        trainer, started, stepped = self._trainer, False, False

        def begin(batch: Any) -> bool:
            nonlocal started
            self._first(batch)
            trainer.compile(batch, global_batch_size=self._arguments.global_batch_size)
            for callback in self._arguments.callbacks:
                callback.on_fit_start(trainer)
            self._meter.start(self._total, self._begin)
            started = True
            self._ending.decide_together()
            return self._ending.reason is None

        # The hooks after a step, in their order.
        hooks: tuple[StepHook, ...] = (
            lambda record: self._meter.advance(record.step),
            self._call_back,
            self._metrics,
            self._evaluation,
            self._saving.after_step,
            self._ending,
        )
        size, within = self._arguments.global_batch_size, self._interruption.step
        try:
            for record in steps_of(trainer, source, size, begin=begin, within=within):
                stepped = True
                for hook in hooks:
                    hook(record)
                if self._ending.reason is not None:
                    break
            self._metrics.flush()
            if self._goes_on(stepped=stepped):
                self._await_same_end()
                self._evaluation.end()
        finally:
            self._meter.stop()
            if started:
                for callback in self._arguments.callbacks:
                    callback.on_fit_end(trainer)

    def _call_back(self, record: StepRecord) -> None:
        for callback in self._arguments.callbacks:
            if callback.wants(record.step):
                callback.on_step(self._trainer, record.step)

    def _goes_on(self, *, stepped: bool) -> bool:
        """Return True if the work after the last step is done; print the reason if the loop was stopped.

        Args:
          stepped: True if there was a step.
        """
        trainer, reason = self._trainer, self._ending.reason
        if reason is None:
            return True
        if reason.kind != "stopped":
            return False
        trainer.stopping = reason.text
        said = "stopped after step" if stepped else "nothing to do after step"
        self._meter.message(f"{said} {trainer.step}: {reason.text}")
        return stepped
