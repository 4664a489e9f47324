"""The training loop: `training_steps` gives each step to a loop of the user, and `fit` is a loop with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.trainers.callbacks.base import Callback, CallbackStates, end_callbacks
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.remainder import Remainder, RemainderRule
from jaxpp_flax.trainers.data.stream import Batches, DataTracking
from jaxpp_flax.trainers.ending.interruption import Interruption
from jaxpp_flax.trainers.ending.preemption import Preemption
from jaxpp_flax.trainers.ending.stopping import Ending
from jaxpp_flax.trainers.loop.fit_arguments import FitArguments
from jaxpp_flax.trainers.loop.hooks import (
    Evaluate,
    LogMetrics,
    LoopHook,
    StepHook,
    StepRecord,
    TrainerProtocol,
    check_hooks,
    leave_hooks,
    run_steps,
)
from jaxpp_flax.trainers.loop.progress import Display
from jaxpp_flax.trainers.loop.saving import Saving
from jaxpp_flax.trainers.loop.tracked_run import TrackedRun
from jaxpp_flax.trainers.metrics.summary import summarise_run
from jaxpp_flax.trainers.state.holder import StateHolder

__all__ = ["TrainingLoop"]


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """Runs the loops over data: their beginning, their batches, their steps and their end.

    Args:
      deadline: seconds from SIGTERM to the end; None does not handle the signal.
      config: the user's part of the configuration, for the tracker.
      await_same_end: waits, after the last step, until every process has taken the same number of steps.
    """

    rows: BatchSharding
    held: StateHolder
    checkpoints: Checkpointing
    saving: Saving
    tracking: DataTracking
    callbacks: CallbackStates
    config: Mapping[str, Any]
    display: Display
    deadline: float | None
    await_same_end: Callable[[], None]

    def steps(
        self,
        trainer: TrainerProtocol,
        data: Iterable[Any],
        *,
        steps: int | None,
        epochs: int | None,
        global_batch_size: int | None,
        remainder: Remainder | None,
        hooks: Sequence[StepHook],
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """As `PipelineTrainer.training_steps`."""
        check_hooks(hooks)
        trainer.measures.begin()
        rule = self._rule(remainder, global_batch_size)
        with self.saving.owned():
            if self.saving.by_itself:
                self.saving.refuse_later_checkpoints()
            drawn = self.tracking.drawn_from(data)
            source = self.tracking.enter(Batches(data, steps=steps, epochs=epochs, drawn=drawn, remainder=rule))
            trainer.stopping, beginning = None, trainer.step
            ending = Ending(trainer, self.stopping_group(), Interruption(raises=False), Preemption(None))
            all_hooks = (*hooks, self.saving.after_step, ending)
            try:
                batches = trainer.measures.clock.each(source, "data")
                for record in run_steps(trainer, batches, global_batch_size, all_hooks, begin=lambda _: True):
                    yield record.step, dict(record.metrics)
                    if ending.reason is not None:
                        self.display.message(f"stopped after step {record.step}: {ending.reason.text}")
                        break
                for hook in hooks:
                    if isinstance(hook, LoopHook):
                        hook.end()
            except BaseException as error:  # `break` in the user's loop comes here too
                try:
                    leave_hooks(hooks, trainer, error)
                finally:
                    again = "trainer.restore() before training_steps(the data after the saved step)"
                    self.saving.finish(error, beginning, again)
                raise
            else:
                self.saving.end(lambda: False)
            finally:
                self.tracking.leave(source)

    def fit(self, trainer: TrainerProtocol, data: Iterable[Any], arguments: FitArguments) -> dict[str, Any]:
        """As `PipelineTrainer.fit`."""
        self.display.renew()
        trainer.measures.begin()
        self.saving.agree_on_fit(arguments.common(), evaluates=arguments.eval_data is not None)
        with self.saving.owned():
            position = self.checkpoints.resume(arguments.resume) if arguments.resume else None
            if not arguments.resume:
                self.saving.refuse_later_checkpoints()
            begin = trainer.step
            try:
                result = self._fit(trainer, data, arguments, position)
            except BaseException:
                if self.stopping_group().process_count == 1:  # others might not come to read it together
                    self.held.load()
                raise
            self.held.load()  # a checkpoint that no step has read
            if arguments.resume and trainer.step == begin:
                return {**self.checkpoints.metrics(), **result}
            return result

    def _fit(
        self, trainer: TrainerProtocol, data: Iterable[Any], arguments: FitArguments, position: DataPosition | None
    ) -> dict[str, Any]:
        """Run the loop from `position` on."""
        steps = arguments.steps
        if arguments.resume and steps is not None:
            if trainer.step >= steps:
                self.display.message(f"nothing to do: step {trainer.step} of {steps} is done")
                return {}
            steps -= trainer.step
        rule = self._rule(arguments.remainder, arguments.global_batch_size)
        source = self.tracking.enter(
            Batches(
                data, steps=steps, epochs=arguments.epochs, position=position, resume_data=arguments.resume_data,
                meter=self.display.meter, drawn=self.tracking.drawn_from(data), remainder=rule,
            )
        )  # fmt: skip
        trainer.stopping = None
        tracked = TrackedRun(trainer, self.config)
        arguments = replace(arguments, callbacks=(tracked, *arguments.callbacks))
        self.callbacks.begin(arguments.callbacks, resumed=bool(arguments.resume))
        run = _Fit(self, trainer, arguments, source.steps_left()).run
        try:
            return run(source, tracked.close)
        finally:
            self.tracking.leave(source)

    def stopping_group(self) -> ProcessGroup:
        """Return the processes that end a loop together."""
        # With several processes, one process may train its own model, without the others.
        alone = not self.rows.is_across and self.checkpoints.store is None
        return ProcessGroup(None, 0, 1) if alone else process_group()

    def _rule(self, remainder: Remainder | None, global_batch_size: int | None) -> RemainderRule:
        return RemainderRule.of(remainder, global_batch_size, self.display.meter)


class _Fit:
    """One run of `fit` over batches; `total` is the number of steps to take, if known."""

    def __init__(
        self, loop: TrainingLoop, trainer: TrainerProtocol, arguments: FitArguments, total: int | None
    ) -> None:
        self._loop, self._trainer, self._arguments = loop, trainer, arguments
        self._begin, self._meter = trainer.step, loop.display.meter
        self._total = None if total is None else self._begin + total
        group = loop.stopping_group()
        self._is_alone = group.process_count == 1
        self._interruption = Interruption(raises=self._is_alone)
        self._preemption = Preemption(loop.deadline)
        self._ending = Ending(trainer, group, self._interruption, self._preemption)
        store = loop.checkpoints.store
        self._log = LogMetrics(
            trainer, callbacks=arguments.callbacks, total=self._total, meter=self._meter,
            ranking=None if store is None else store.ranking,
        )  # fmt: skip
        self._held_back: StepRecord | None = None  # a step whose save waits until a further batch comes
        self._evaluation = LoopHook()
        if arguments.eval_data is not None:
            self._evaluation = Evaluate(
                trainer,
                arguments.eval_data,
                every=arguments.eval_every,
                global_batch_size=arguments.eval_global_batch_size,
                log=self._log,
                callbacks=(*arguments.callbacks, loop.checkpoints.measured, self._ending),
            )

    def run(self, source: Iterable[Any], close: Callable[[], None]) -> dict[str, Any]:
        """Train on every batch of `source`, and save; `close` is called last."""
        with self._interruption, self._preemption:  # also while trackers are closed, which may hang
            try:
                preempted = self._train_and_save(source)
            finally:
                close()
            if preempted or self._preemption.requested:
                if self._is_alone:  # SIGTERM may have come after the last save
                    self._loop.saving.end(lambda: True)
                self._loop.saving.exit_preempted()
        return self._log.last

    def _train_and_save(self, source: Iterable[Any]) -> bool:
        """Return True if SIGTERM has ended the run."""
        saving = self._loop.saving
        try:
            self._train(source)
        except BaseException as error:
            saving.finish(error, self._begin, "fit(..., resume=True)")
            if isinstance(error, KeyboardInterrupt):
                saving.interrupted(error, whole=not self._interruption.within_step, together=self._is_alone)
            raise
        asked = self._ending.after_last_step()
        if asked is not None and asked.kind == "interrupted":
            interrupted = KeyboardInterrupt()
            saving.interrupted(interrupted, whole=True, together=True)
            raise interrupted
        preempted = asked is not None and asked.kind == "preempted"
        saving.end(lambda: preempted or (self._is_alone and self._preemption.requested))
        self._summarise()
        return preempted

    def _summarise(self) -> None:
        """Print what the run did."""
        step, log, store = self._trainer.step, self._log, self._loop.checkpoints.store
        if step > self._begin:
            directory = None if store is None else store.directory
            seconds, units = self._trainer.measures.seconds(), (log.units, log.unit)
            self._meter.message(summarise_run(step, step - self._begin, seconds, units, log.best, directory))

    def _train(self, source: Iterable[Any]) -> None:
        trainer, stepped, begun = self._trainer, False, list[Callback]()
        size, callbacks = self._arguments.global_batch_size, self._arguments.callbacks

        def begin(batch: Any) -> bool:
            trainer.compile(batch, global_batch_size=size)
            for callback in callbacks:
                callback.on_fit_start(trainer)
                begun.append(callback)
            self._meter.start(self._total, self._begin)
            self._ending.decide_together()
            return self._ending.reason is None

        show = lambda record: self._meter.advance(record.step)  # noqa: E731
        interrupt = lambda _: self._interruption.raise_requested()  # noqa: E731
        # The row of the step before comes first: a tracker such as W&B takes no step that is lower than another one.
        hooks = (show, self._log, self._call, interrupt, self._evaluation, self._ending, self._save)
        source = self._saved(trainer.measures.clock.each(source, "data"))
        steps = run_steps(trainer, source, size, hooks, begin=begin, within=self._interruption.step)
        try:
            for _ in steps:
                stepped = True
                if self._ending.reason is not None:
                    break
            self._log.end()
            if self._goes_on(stepped=stepped):
                self._loop.await_same_end()
                self._evaluate_at_end()
        except BaseException as error:
            at_once = self._interruption.within_step or self._interruption.repeated
            try:
                self._log.leave(error, at_once=isinstance(error, KeyboardInterrupt) and at_once)
            finally:
                self._meter.stop()
                end_callbacks(begun, trainer, error)
            raise
        self._meter.stop()
        end_callbacks(begun, trainer)

    def _call(self, record: StepRecord) -> None:
        for callback in self._arguments.callbacks:
            if callback.wants(record.step):
                callback.on_step(self._trainer, record.step)

    def _save(self, record: StepRecord) -> None:
        """Save if a save is due. A step that an evaluation would follow at the end of the data waits for that end."""
        if self._evaluation.is_due_at_end:
            self._held_back = record
        self._loop.saving.after_step(record, saves=self._held_back is None)

    def _saved(self, source: Iterable[Any]) -> Iterator[Any]:
        """Give the batches; a further batch shows that the step before was not the last, so its save is due now."""
        iterator = iter(source)
        while True:
            try:
                batch = next(iterator, None)
            except Exception:
                if self._is_alone:  # other processes would not come
                    self._save_held_back()
                raise
            if batch is None:
                return
            self._save_held_back()
            yield batch

    def _save_held_back(self) -> None:
        record, self._held_back = self._held_back, None
        if record is not None:
            self._loop.saving.after_step(record)

    def _evaluate_at_end(self) -> None:
        """Evaluate after the last step, where that is due."""
        try:
            self._evaluation.end()
        except Exception:
            if self._is_alone:  # other processes would not come
                self._loop.saving.end(lambda: False)
            raise

    def _goes_on(self, *, stepped: bool) -> bool:
        """Return True if the work after the last step is done; print the reason if the loop was stopped."""
        trainer, reason = self._trainer, self._ending.reason
        if reason is None:
            return True
        if reason.kind != "stopped":
            return False
        trainer.stopping = reason.text
        said = "stopped after step" if stepped else "nothing to do after step"
        self._meter.message(f"{said} {trainer.step}: {reason.text}")
        return stepped
