"""The loop: draw a batch, take a step, call the callbacks, end. `fit` is this loop with callbacks of the trainer.

The trainer's own callbacks and the user's stand in one list, `_in_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.checkpoint.shared_directory import check_shared
from jaxpp_flax.processes.comparison import compare_lines
from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.trainers.callbacks.base import Callback, CallbackStates, StepRecord, end_callbacks, named, overrides
from jaxpp_flax.trainers.callbacks.evaluate import Evaluate
from jaxpp_flax.trainers.callbacks.interruption import Interruption
from jaxpp_flax.trainers.callbacks.log_metrics import LogMetrics
from jaxpp_flax.trainers.callbacks.preemption import PREEMPTED_STATUS, Preemption
from jaxpp_flax.trainers.callbacks.save import Save
from jaxpp_flax.trainers.callbacks.stop import Stop
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.remainder import Remainder, RemainderRule, check_mask, check_masked
from jaxpp_flax.trainers.data.stream import Batches, DataTracking
from jaxpp_flax.trainers.loop.fit_arguments import FitArguments
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.step.loss_trace import LossTrace

__all__ = ["TrainingLoop"]


def _in_order(
    log: LogMetrics | None, users: Sequence[Callback], evaluation: Evaluate | None, stop: Stop, save: Save
) -> tuple[Callback, ...]:
    """Return the callbacks of a loop in the order in which they are called; see `Callback` for the end.

    The row of the step before comes first: a tracker such as W&B takes no step that is lower than another one. Then the
    user's callbacks; Ctrl-C, once the step is noted; an evaluation; the decision whether this step is the last one;
    and the save, with the metrics of the evaluation.
    """
    own_first, evaluations = [] if log is None else [log], [] if evaluation is None else [evaluation]
    return (*own_first, *users, stop.interruption, *evaluations, stop, save)


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """Runs the loops over data.

    Args:
      callbacks: the states of the callbacks, for checkpoints.
      saves: True if a loop saves by itself: when a save is due, and after its last step.
      deadline: seconds from SIGTERM to the end; None does not handle the signal.
      trace: traces the training loss for given microbatches.
      await_same_end: waits, after the last step, until every process has taken the same number of steps.
    """

    rows: BatchSharding
    held: StateHolder
    checkpoints: Checkpointing
    tracking: DataTracking
    callbacks: CallbackStates
    display: Display
    saves: bool
    deadline: float | None
    trace: Callable[[Any], LossTrace]
    await_same_end: Callable[[], None]

    def run(
        self,
        trainer: Any,
        source: Batches,
        callbacks: Sequence[Callback],
        stop: Stop,
        save: Save,
        *,
        users: Sequence[Callback],
        global_batch_size: int | None,
        check_first: Callable[[Any], None],
    ) -> Generator[StepRecord]:
        """Train on every batch of `source`; a step runs when the consumer asks for its record.

        Args:
          callbacks: all of them, in order; `users` are those that end only if they began.
          check_first: called with the first batch.
        """
        trainer.callbacks, trainer.stopping = callbacks, None
        begun = [callback for callback in callbacks if callback not in users]
        stepping = [callback for callback in callbacks if overrides(callback, "on_step")]
        begins_at, ended = None, None
        try:
            for batch in trainer.measures.clock.each(source, "data"):
                save.on_next_batch()
                if begins_at is None:
                    begins_at = trainer.step
                    check_first(batch)
                    trainer.compile(batch, global_batch_size=global_batch_size)
                    for callback in callbacks:
                        callback.on_fit_start(trainer)
                        begun.append(callback)
                    if stop.reason is not None:
                        break
                with stop.interruption.step():
                    metrics = trainer.train_step(batch, global_batch_size=global_batch_size)
                record = StepRecord(trainer.step, metrics, batch, global_batch_size)
                for callback in stepping:
                    if callback.wants(record.step):
                        callback.on_step(trainer, record)
                yield record
                if stop.reason is not None:
                    break
            stop.raise_decided()
            if stop.reason is not None:  # by `trainer.stop`, perhaps of another process
                trainer.stopping, has_stepped = stop.reason.text, trainer.step != begins_at
                said = "stopped after step" if has_stepped else "nothing to do after step"
                self.display.message(f"{said} {trainer.step}: {trainer.stopping}")
            if trainer.step != begins_at:
                self.await_same_end()
        except BaseException as error:  # `break` in the user's loop comes here too
            ended = error
        try:
            end_callbacks([callback for callback in callbacks if callback in begun], trainer, ended)
        finally:
            ended = None  # else the error would hold itself, by its traceback and this frame
            self.tracking.leave(source)
            trainer.callbacks = ()

    def steps(
        self,
        trainer: Any,
        data: Iterable[Any],
        *,
        steps: int | None,
        epochs: int | None,
        global_batch_size: int | None,
        remainder: Remainder | None,
        callbacks: Sequence[Callback],
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Train batch by batch in your own loop: yield `(step, metrics)` after each step is dispatched.

        With `Checkpoints(every=)` the loop saves as `fit` does: when a save is due, and after the last step. With the
        callbacks `LogMetrics` and `Evaluate` the loop logs and evaluates as `fit` does.

        Args:
          data, steps, epochs, global_batch_size, remainder: as in `fit`.
          callbacks: called after each step, before a save and before the loop's body. `trainer.stop` ends the loop.

        Raises:
          TypeError: for what is no callback.
          ValueError: for a callback that waits for metrics where none logs them.
          CheckpointSaveError: if the directory holds later checkpoints.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from flax import nnx
          >>> from jaxpp_flax import DictTracker, PipelineTrainer
          >>> from jaxpp_flax.trainers import Logging, LogMetrics
          >>> tracker = DictTracker()
          >>> trainer = PipelineTrainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
          ...                           lambda model, x: (model(x) ** 2).mean(), num_stages=1, num_microbatches=2,
          ...                           logging=Logging(tracker=tracker, every=2, progress=False))
          >>> for step, metrics in trainer.training_steps([jnp.ones((4, 2))], steps=4, callbacks=[LogMetrics()]):
          ...     pass
          >>> sorted(tracker["loss"])  # the first step, the last one, and each second one
          [1, 2, 4]
        """
        named(callbacks)
        _check_metrics_are_logged(callbacks)
        trainer.measures.begin()
        rule = self._rule(remainder, global_batch_size)
        again = "trainer.restore() before training_steps(the data after the saved step)"
        stop = Stop(self.stopping_group(), Interruption(raises=False), Preemption(None))  # which nothing asks to end
        save = Save(self.checkpoints, by_itself=self.saves, again=again, stop=stop)
        with save.owned():
            if self.saves:
                save.refuse_later_checkpoints()
            drawn = self.tracking.drawn_from(data)
            source = self.tracking.enter(Batches(data, steps=steps, epochs=epochs, drawn=drawn, remainder=rule))
            self.callbacks.begin(callbacks, resumed=False)
            records = self.run(
                trainer, source, _in_order(None, callbacks, None, stop, save), stop, save,
                users=callbacks, global_batch_size=global_batch_size,
                check_first=lambda batch: self._check_filling(rule, batch),
            )  # fmt: skip
            with closing(records):  # before the directory is given up
                for record in records:
                    yield record.step, dict(record.metrics)

    def fit(self, trainer: Any, data: Iterable[Any], arguments: FitArguments) -> dict[str, Any]:
        """Train on `data`.

        Args:
          data: an iterable of batches: a list, a generator, a grain dataset or loader.
          steps: the number of steps to train. Data that can be iterated again is repeated as needed.
          epochs: the number of passes over the data, which must allow a new iteration. Without steps and epochs: one.
          global_batch_size: None: each process passes the whole batches (leaves that it does not read may be shapes). A
            number: the number of examples in a batch; each process passes only the examples that it reads, `rows_read`.
          remainder: the rule for a batch with fewer examples than the first one, such as the last one of a pass. "drop"
            leaves it out. "pad" repeats the last example, and the loss ignores these copies by `batch["mask"]` (see
            `docs/guides/data.md`). "error" refuses the batch. None: an error before the first step if data is a list,
            else "drop", with a message. A batch with more examples than the first one is refused.
          eval_data: data to evaluate at the end, and every `eval_every` steps.
          eval_global_batch_size: as `global_batch_size`, for `eval_data`: see `evaluate`.
          callbacks: see `jaxpp_flax.trainers.callbacks`.
          resume: True continues from the latest checkpoint, or from the state in memory if there is no checkpoint;
            `steps` and `epochs` count from the beginning. "latest_valid" sets damaged checkpoints aside and takes the
            newest whole one.
          resume_data: how to find the position in data without `set_state`: "fast_forward" draws the used batches and
            drops them, "refuse" raises, "restart" begins the data again.

        Returns:
          The last metrics, as floats; the metrics of the last evaluation as `eval_loss`, ... A resumed run that has no
          step left returns those that its checkpoint has.

        Raises:
          ValueError, TypeError: for arguments that do not fit, before the first step.
          NonFiniteLossError: see `train_step`.
          CorruptCheckpointError: if the latest checkpoint is damaged, unless `resume="latest_valid"`.
        """
        trainer.measures.begin()
        self._agree_on_fit(arguments.common(), evaluates=arguments.eval_data is not None)
        group = self.stopping_group()
        stop = Stop(group, Interruption(raises=group.process_count == 1), Preemption(self.deadline))
        evaluation = None
        if arguments.eval_data is not None:
            evaluation = Evaluate(
                arguments.eval_data, every=arguments.eval_every, global_batch_size=arguments.eval_global_batch_size
            )
        save = Save(
            self.checkpoints, by_itself=self.saves, again="fit(..., resume=True)", stop=stop, evaluation=evaluation
        )
        with save.owned():
            position = self.checkpoints.resume(arguments.resume) if arguments.resume else None
            if not arguments.resume:
                save.refuse_later_checkpoints()
            begin = trainer.step
            try:
                result = self._fit(trainer, data, arguments, position, evaluation, stop, save)
            except BaseException:
                if self.stopping_group().process_count == 1:  # others might not come to read it together
                    self.held.load()
                raise
            self.held.load()  # a checkpoint that no step has read
            if arguments.resume and trainer.step == begin:
                return {**self.checkpoints.metrics(), **result}
            return result

    def _fit(
        self,
        trainer: Any,
        data: Iterable[Any],
        arguments: FitArguments,
        position: DataPosition | None,
        evaluation: Evaluate | None,
        stop: Stop,
        save: Save,
    ) -> dict[str, Any]:
        """Run the loop from `position` on."""
        steps, users, store = arguments.steps, arguments.callbacks, self.checkpoints.store
        if arguments.resume and steps is not None:
            if trainer.step >= steps:
                self.display.message(f"nothing to do: step {trainer.step} of {steps} is done")
                return {}
            steps -= trainer.step
        rule = self._rule(arguments.remainder, arguments.global_batch_size)
        source = self.tracking.enter(
            Batches(
                data, steps=steps, epochs=arguments.epochs, position=position, resume_data=arguments.resume_data,
                display=self.display, drawn=self.tracking.drawn_from(data), remainder=rule,
            )
        )  # fmt: skip
        left = source.steps_left()
        log = LogMetrics(
            display=self.display,
            total=None if left is None else trainer.step + left,
            ranking=None if store is None else store.ranking,
            directory=None if store is None else store.directory,
            hurries=lambda: stop.interruption.repeated or stop.interruption.within_step,
        )
        self.callbacks.begin((log, *users), resumed=bool(arguments.resume))
        records = self.run(
            trainer, source, _in_order(log, users, evaluation, stop, save), stop, save,
            users=users, global_batch_size=arguments.global_batch_size,
            check_first=lambda batch: self._check_filling(rule, batch),
        )  # fmt: skip
        with stop.interruption, stop.preemption:  # also while trackers are closed, which may hang
            try:
                with closing(records):
                    for _ in records:
                        pass
            except SystemExit:
                if stop.is_preempted:
                    save.tell_preempted()
                raise
            if stop.preemption.requested:  # after the last save
                if stop.is_alone:
                    save.save_last()
                save.tell_preempted()
                raise SystemExit(PREEMPTED_STATUS)
        return log.last

    def stopping_group(self) -> ProcessGroup:
        """Return the processes that end a loop together."""
        # With several processes, one process may train its own model, without the others.
        alone = not self.rows.is_across and self.checkpoints.store is None
        return ProcessGroup(None, 0, 1) if alone else process_group()

    def _agree_on_fit(self, arguments: Mapping[str, Any], *, evaluates: bool) -> None:
        """Before the first step, make sure that every process has equal `fit` arguments, and the same directory.

        Raises:
          ProgramMismatchError: the message names the first argument that differs, and the processes.
          CheckpointSaveError: if the processes do not see the same directory of checkpoints.
        """
        if not self.rows.is_across:
            return
        store = self.checkpoints.store
        self.checkpoints.meet("trainer.fit")
        lines = [
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
            f"{'with' if evaluates else 'no'} eval_data",
            "no checkpoints" if store is None else f"checkpoints, {store.describe()}",
        ]
        compare_lines(process_group(), "the arguments of fit", lines, None)
        if store is not None:
            check_shared(store.directory)

    def _rule(self, remainder: Remainder | None, global_batch_size: int | None) -> RemainderRule:
        return RemainderRule.of(remainder, global_batch_size, self.display)

    def _check_filling(self, rule: RemainderRule, batch: Any) -> None:
        """Before a first step, make sure that the loss ignores the examples that `rule` adds to batches."""
        if rule.how == "pad":
            check_mask(batch)
            found = self.trace(self.rows.split(batch))
            check_masked(found.weighed_by, found.unweighted)


def _check_metrics_are_logged(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that wait for metrics, if no `LogMetrics` of a loop of the user's gives them any."""
    waiting = [callback for callback in callbacks if overrides(callback, "on_metrics")]
    if waiting and not any(isinstance(callback, LogMetrics) for callback in callbacks):
        raise ValueError(
            f"callbacks holds a {type(waiting[0]).__name__}, which waits for `on_metrics`, but nothing gives it "
            "metrics: put LogMetrics() before it."
        )
