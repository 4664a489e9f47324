"""The loop: draw a batch, take a step, call the callbacks, end. `fit` is this loop with callbacks of the trainer.

The trainer's own callbacks and the user's stand in one list, `_in_order`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxpp_flax.checkpoint.shared_directory import check_shared
from jaxpp_flax.counts import check_count
from jaxpp_flax.processes.comparison import compare_lines
from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.trainers.callbacks.base import Callback, CallbackStates, StepRecord, end_callbacks, named, overrides
from jaxpp_flax.trainers.callbacks.ctrl_c import Interruption
from jaxpp_flax.trainers.callbacks.evaluate import Evaluate
from jaxpp_flax.trainers.callbacks.log_metrics import LogMetrics
from jaxpp_flax.trainers.callbacks.sigterm import PREEMPTED_STATUS, Preemption
from jaxpp_flax.trainers.callbacks.stop import Stop
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.remainder import Remainder, RemainderRule
from jaxpp_flax.trainers.data.stream import Batches, TrainingData, check_batches
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.loop.fit_arguments import FitArguments
from jaxpp_flax.trainers.loop.save import Save
from jaxpp_flax.trainers.loop.state_in_memory import StateInMemory
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.state.holder import StateHolder

__all__ = ["TrainingLoop"]

_EXITING = f"exiting with status {PREEMPTED_STATUS}"


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
      saves: True if a loop saves when a save is due, and after its last step; `fit` always saves its last step.
      deadline: seconds from SIGTERM to the end; None does not handle the signal.
      memory_every: steps of `fit` between two copies of the state in memory; None makes none.
    """

    held: StateHolder
    checkpoints: Checkpointing
    data: TrainingData
    callbacks: CallbackStates
    display: Display
    saves: bool
    deadline: float | None
    memory_every: int | None = None

    def run(
        self,
        trainer: Any,
        source: Batches,
        *,
        users: Sequence[Callback],
        stop: Stop,
        save: Save,
        global_batch_size: int | None,
        log: LogMetrics | None = None,
        evaluation: Evaluate | None = None,
    ) -> Generator[StepRecord]:
        """Train on every batch of `source`; a step runs when the consumer asks for its record.

        The callbacks of `users` end only if they began.
        """
        callbacks = _in_order(log, users, evaluation, stop, save)
        trainer.callbacks, trainer.stopping = callbacks, None
        begun = [callback for callback in callbacks if callback not in users]
        stepping = [callback for callback in callbacks if overrides(callback, "on_step")]
        begins_at, ended = None, None
        self.data.begin(source)
        try:
            for batch in trainer.measures.clock.each(source, "data"):
                save.on_next_batch()
                if begins_at is None:
                    begins_at = trainer.step
                    trainer.compile(batch, global_batch_size=global_batch_size)
                    for callback in callbacks:
                        callback.on_fit_start(trainer)
                        begun.append(callback)
                    if stop.reason is not None:
                        break
                with stop.interruption.step():
                    metrics = trainer.train_step(batch, global_batch_size=global_batch_size)
                size = trainer.steps.rows.whole_size(batch, global_batch_size)
                record = StepRecord(trainer.step, metrics, batch, size)
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
                self._await_same_end()
        except BaseException as error:  # `break` in the user's loop comes here too
            ended = error
        try:
            end_callbacks([callback for callback in callbacks if callback in begun], trainer, ended)
        finally:
            ended = None  # else the error would hold itself, by its traceback and this frame
            self.data.end(source)
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
        """As `PipelineTrainer.training_steps`. The arguments are checked now, all else waits for the first step."""
        named(callbacks)
        _check_metrics_are_logged(callbacks)
        check_batches("data", data)
        rule = RemainderRule.of(remainder, global_batch_size, self.display)
        counts = {"steps": steps, "epochs": epochs, "global_batch_size": global_batch_size}
        for name, count in counts.items():
            if count is not None:
                check_count(name, count)
        begin = partial(self.data.batches, data, steps=steps, epochs=epochs, remainder=rule)
        return self._steps(trainer, begin, callbacks, global_batch_size)

    def _steps(
        self, trainer: Any, begin: Callable[[], Batches], callbacks: Sequence[Callback], global_batch_size: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        trainer.measures.begin()
        if self.memory_every is not None:
            self.display.message("Checkpoints(memory_every=) has no effect on training_steps: fit alone makes copies")
        again = "trainer.restore() before training_steps(the data after the saved step)"
        preemption = Preemption(self.deadline, self._what_is_left)
        stop = Stop(self.stopping_group(), Interruption(raises=False), preemption)  # Ctrl-C is the user's
        save = Save(self.checkpoints, by_itself=self.saves, again=again, stop=stop, saves_interrupted=False)
        with save.begun():
            if self.saves:
                save.refuse_later_checkpoints()
            source = begin()
            self.callbacks.begin(callbacks, resumed=False)
            records = self.run(
                trainer, source, users=callbacks, stop=stop, save=save, global_batch_size=global_batch_size
            )
            with closing(_preemptible(records, stop, save)) as preemptible:
                for record in preemptible:
                    yield record.step, dict(record.metrics)

    def fit(self, trainer: Any, data: Iterable[Any], arguments: FitArguments) -> dict[str, Any]:
        """As `PipelineTrainer.fit`."""
        trainer.measures.begin()
        if process_group().attempt > 1 and not trainer.step and self.checkpoints.store is not None:
            arguments = replace(arguments, resume=arguments.resume or True)  # the launcher has started the run again
        self._agree_on_fit(arguments.common(), evaluates=arguments.eval_data is not None)
        group = self.stopping_group()
        preemption = Preemption(self.deadline, self._what_is_left)
        stop = Stop(group, Interruption(raises=group.process_count == 1), preemption)
        evaluation = None
        if arguments.eval_data is not None:
            evaluation = Evaluate(
                arguments.eval_data, every=arguments.eval_every, steps=arguments.eval_steps,
                global_batch_size=arguments.eval_global_batch_size,
            )  # fmt: skip
        save = Save(
            self.checkpoints, by_itself=self.checkpoints.store is not None, again="fit(..., resume=True)", stop=stop,
            saves_interrupted=True, tells=not self.saves, evaluation=evaluation,
            memory=StateInMemory.of(self.checkpoints, self.memory_every),
        )  # fmt: skip
        with save.begun():
            position = save.resume(arguments.resume) if arguments.resume else None
            self.held.check_owned("trainer.fit")
            if not arguments.resume:
                save.refuse_later_checkpoints()
            begin = trainer.step
            try:
                result = self._fit(trainer, data, arguments, position, evaluation, stop, save)
            except BaseException as error:
                if self.stopping_group().process_count == 1:  # others might not come to read it together
                    self.held.load()
                if isinstance(error, KeyboardInterrupt) and stop.interruption.requested:
                    error.with_traceback(None)  # it came within a step: where it was raised tells nothing
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
                save.save_resumed()
                return {}
            steps -= trainer.step
        source = self.data.batches(
            data, steps=steps, epochs=arguments.epochs, position=position, resume_data=arguments.resume_data,
            ends_at_step=bool(arguments.resume),
            remainder=RemainderRule.of(arguments.remainder, arguments.global_batch_size, self.display),
        )  # fmt: skip
        left, interruption = source.steps_left(), stop.interruption  # `stop` refers to this loop, which keeps `log`
        log = LogMetrics(
            display=self.display,
            total=None if left is None else trainer.step + left,
            ranking=None if store is None else store.ranking,
            directory=None if store is None else store.directory,
            hurries=lambda: interruption.repeated or interruption.within_step,
        )
        self.callbacks.begin((log, *users), resumed=bool(arguments.resume))
        records = self.run(
            trainer, source, users=users, stop=stop, save=save, global_batch_size=arguments.global_batch_size,
            log=log, evaluation=evaluation,
        )  # fmt: skip
        with stop.interruption, closing(_preemptible(records, stop, save)) as preemptible:
            for _ in preemptible:
                pass
        return log.last

    def _what_is_left(self) -> str:
        """Return where a run that SIGTERM has cut off goes on."""
        store = self.checkpoints.store
        latest = None if store is None else store.latest()
        if store is None or latest is None:
            return "No checkpoint is complete."
        return f"The newest complete checkpoint is that of step {latest} in {store.directory}."

    def stopping_group(self) -> ProcessGroup:
        """Return the processes that end a loop together."""
        # With several processes, one process may train its own model, without the others.
        alone = not self.held.is_across and self.checkpoints.store is None
        return ProcessGroup(None, 0, 1) if alone else process_group()

    def _agree_on_fit(self, arguments: Mapping[str, Any], *, evaluates: bool) -> None:
        """Before the first step, make sure that every process has equal `fit` arguments, and the same directory.

        Raises:
          ProgramMismatchError: the message names the first argument that differs, and the processes.
          CheckpointSaveError: if the processes do not see the same directory of checkpoints.
        """
        if not self.held.is_across:
            return
        store = self.checkpoints.store
        self.held.meet("trainer.fit")
        lines = [
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
            f"{'with' if evaluates else 'no'} eval_data",
            "no checkpoints" if store is None else f"checkpoints, {store.describe()}, memory_every={self.memory_every}",
        ]
        compare_lines(process_group(), "the arguments of fit", lines, None)
        if store is not None:
            check_shared(store.directory)

    def _await_same_end(self) -> None:
        """After the last step, wait until every process has trained the same steps, on the same batches.

        Raises:
          ValuesMismatchError: if the batches differ.
          BatchError: if the numbers of steps differ; a process that others wait for ends the run instead.
        """
        if not self.held.is_across:
            return
        # Once the state is ready, this process has sent all values of its last step.
        jax.block_until_ready(jax.tree.leaves(self.held.memory))
        step = self.held.step
        why = f"its data ended, or it was stopped, after step {step}. Give every process batches for the same steps"
        answers = process_group().exchange("the end of fit", str(step).encode(), idle_reason=why)
        if len(set(answers)) > 1:
            listing = ", ".join(f"process {index}: {int(text)}" for index, text in enumerate(answers))
            raise BatchError(
                f"the processes trained different numbers of steps ({listing}): data ended earlier on some of them. "
                "Give every process batches for the same steps, or pass `steps=`."
            )
        self.checkpoints.trained_on.end(step)


def _preemptible(records: Generator[StepRecord], stop: Stop, save: Save) -> Generator[StepRecord]:
    """Yield the records of a loop; SIGTERM ends the loop and the process, also while trackers are closed.

    A loop that is left by `break` after a SIGTERM cannot raise the exit: the process gets the signal once more.
    """
    is_left = False
    with stop.preemption:
        try:
            with closing(records):
                yield from records
        except SystemExit:
            if stop.is_preempted:
                save.tell_preempted(_EXITING)
            raise
        except GeneratorExit:
            is_left = True
        if stop.preemption.requested:  # after the last save
            if stop.is_alone:
                save.save_last()
            save.tell_preempted(_EXITING if not is_left else "and the program gets the signal again")
            if not is_left:
                raise SystemExit(PREEMPTED_STATUS)
    if is_left and stop.preemption.requested:
        signal.raise_signal(signal.SIGTERM)


def _check_metrics_are_logged(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that wait for metrics, if no `LogMetrics` of a loop of the user's gives them any."""
    waiting = [callback for callback in callbacks if overrides(callback, "on_metrics")]
    if waiting and not any(isinstance(callback, LogMetrics) for callback in callbacks):
        raise ValueError(
            f"callbacks holds a {type(waiting[0]).__name__}, which waits for `on_metrics`, but nothing gives it "
            "metrics: put LogMetrics() before it."
        )
