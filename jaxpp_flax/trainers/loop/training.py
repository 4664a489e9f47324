"""The trainer's loops over data, `fit` and `training_steps`: their beginning, their batches, and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from jaxpp_flax.trainers.callbacks.states import CallbackStates
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.remainder import Remainder, RemainderRule, check_mask, check_masked
from jaxpp_flax.trainers.data.stream import Batches, DataTracking
from jaxpp_flax.trainers.loop.fit import FitArguments, FitLoop
from jaxpp_flax.trainers.loop.progress import Display
from jaxpp_flax.trainers.loop.saving import Saving
from jaxpp_flax.trainers.loop.steps import TrainerProtocol, steps_of
from jaxpp_flax.trainers.step.loss_trace import LossTrace

__all__ = ["Training"]


class Training:
    """Runs loops of training steps.

    Args:
      rows: the examples that this process loads.
      checkpoints: resumes a run.
      saving: saves to the trainer's directory of checkpoints.
      tracking: gets the source of the batches.
      callbacks: the states of the callbacks.
      display: shows the progress.
      log_every: steps between two rows of metrics.
      deadline: seconds from SIGTERM to the end; None does not handle the signal.
      trace: traces the training loss for given microbatches.
      await_same_end: waits, after the last step, until every process has taken the same number of steps.
    """

    def __init__(
        self,
        rows: BatchSharding,
        *,
        checkpoints: Checkpointing,
        saving: Saving,
        tracking: DataTracking,
        callbacks: CallbackStates,
        display: Display,
        log_every: int,
        deadline: float | None,
        trace: Callable[[Any], LossTrace],
        await_same_end: Callable[[], None],
    ) -> None:
        self._rows, self._checkpoints, self._saving, self._tracking = rows, checkpoints, saving, tracking
        self._callbacks, self._display, self._log_every = callbacks, display, log_every
        self._deadline, self._trace, self._await_same_end = deadline, trace, await_same_end

    def steps(
        self,
        trainer: TrainerProtocol,
        data: Iterable[Any],
        *,
        steps: int | None,
        epochs: int | None,
        global_batch_size: int | None,
        remainder: Remainder | None,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Train batch by batch in your own loop: yield `(step, metrics)` after each step is dispatched.

        With `Checkpoints(every=)` the loop saves as `fit` does: when a save is due, and after the last step.

        Args:
          data, steps, epochs, global_batch_size, remainder: as in `fit`.

        Raises:
          CheckpointSaveError: if the directory holds later checkpoints.
        """
        rule = self._rule(remainder, global_batch_size)
        with self._saving.owned():
            self._saving.refuse_later_checkpoints(only_where_it_saves=True)
            drawn = self._tracking.drawn_from(data)
            source = self._tracking.enter(Batches(data, steps=steps, epochs=epochs, drawn=drawn, remainder=rule))

            def begin(batch: Any) -> bool:
                self._check_filling(rule, batch)
                return True

            try:
                for record in steps_of(trainer, source, global_batch_size, begin=begin):
                    self._saving.after_step(record)
                    yield trainer.step, dict(record.metrics)
            except BaseException as error:  # `break` in the user's loop comes here too
                self._saving.finish(error)
                raise
            else:
                self._saving.end(lambda: False)
            finally:
                self._tracking.leave(source)

    def fit(self, trainer: TrainerProtocol, data: Iterable[Any], arguments: FitArguments) -> dict[str, Any]:
        """Train on `data`, see `PipelineTrainer.fit`."""
        self._display.renew()
        self._saving.agree_on_fit(
            steps=arguments.steps,
            epochs=arguments.epochs,
            global_batch_size=arguments.global_batch_size,
            remainder=arguments.remainder,
            resume=arguments.resume,
            eval_every=arguments.eval_every,
            eval_global_batch_size=arguments.eval_global_batch_size,
            eval_data=arguments.eval_data,
        )
        with self._saving.owned():
            resume, steps, position = arguments.resume, arguments.steps, None
            if not resume:
                self._saving.refuse_later_checkpoints()
            else:
                position = self._checkpoints.resume(resume)
                if steps is not None:
                    if trainer.step >= steps:
                        self._display.message(f"nothing to do: step {trainer.step} of {steps} is done")
                        return {}
                    steps -= trainer.step
            return self._fit(trainer, data, arguments, steps, position)

    def _fit(
        self,
        trainer: TrainerProtocol,
        data: Iterable[Any],
        arguments: FitArguments,
        steps: int | None,
        position: DataPosition | None,
    ) -> dict[str, Any]:
        """Run the loop from `position` on; `steps` is the number of remaining steps."""
        rule = self._rule(arguments.remainder, arguments.global_batch_size)
        source = self._tracking.enter(
            Batches(
                data, steps=steps, epochs=arguments.epochs, position=position, resume_data=arguments.resume_data,
                meter=self._display.meter, drawn=self._tracking.drawn_from(data), remainder=rule,
            )
        )  # fmt: skip
        trainer.stopping = None
        total = _steps_left(data, source, steps, arguments.epochs, position)
        self._callbacks.begin(arguments.callbacks, resumed=bool(arguments.resume))
        try:
            loop = FitLoop(
                trainer,
                self._rows,
                self._saving,
                arguments,
                total,
                meter=self._display.meter,
                log_every=self._log_every,
                deadline=self._deadline,
                first=lambda batch: self._check_filling(rule, batch),
                await_same_end=self._await_same_end,
            )
            return loop.run(source)
        finally:
            self._tracking.leave(source)

    def _rule(self, remainder: Remainder | None, global_batch_size: int | None) -> RemainderRule:
        parts = self._rows.num_microbatches * self._rows.batch_shards
        return RemainderRule.of(remainder, global_batch_size, parts, self._display.meter)

    def _check_filling(self, rule: RemainderRule, batch: Any) -> None:
        """Before a first step, make sure that the loss ignores the examples that `rule` adds to batches."""
        if rule.how == "pad":
            check_mask(batch)
            found = self._trace(self._rows.split(batch))
            check_masked(found.weighed_by, found.unweighted)


def _steps_left(
    data: Iterable[Any], source: Batches, steps: int | None, epochs: int | None, position: DataPosition | None
) -> int | None:
    """Return the number of remaining steps, if known."""
    if not isinstance(data, Sized):
        return steps
    done = 0 if position is None else position.batches - position.epoch * source.left_out
    whole = (len(data) - source.left_out) * (epochs or 1) - done
    if steps is None:
        return whole
    return min(steps, whole) if epochs is not None else steps
