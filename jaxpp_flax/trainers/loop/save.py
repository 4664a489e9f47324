"""The callback that saves; and what else a loop does with the trainer's directory of checkpoints, if there is one."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CheckpointSaveError
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.processes.waits import print_notice
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord
from jaxpp_flax.trainers.callbacks.evaluate import Evaluate
from jaxpp_flax.trainers.callbacks.stop import Stop
from jaxpp_flax.trainers.checkpoints import Checkpointing, Resume
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.errors import NonFiniteLossError
from jaxpp_flax.trainers.loop.ranking import RankingCheck
from jaxpp_flax.trainers.loop.state_in_memory import StateInMemory
from jaxpp_flax.trainers.metrics.summary import after_error

__all__ = ["Save"]


class Save(Callback):
    """Saves a step when a save is due, and after the last step.

    Args:
      checkpoints: saves the state.
      by_itself: False leaves saves to `trainer.save`, but for the last one after SIGTERM or Ctrl-C.
      tells: True tells that the last step is saved, with a directory alone.
      again: the call that goes on from a checkpoint, for errors.
      stop: knows how the loop ends.
      saves_interrupted: True saves the last step after Ctrl-C too; a loop of the user's own leaves that to the user.
      evaluation: a step that an evaluation would follow at the end waits for that: its checkpoint has those metrics.
      memory: makes copies of the state in memory; None: none.
    """

    def __init__(
        self,
        checkpoints: Checkpointing,
        *,
        by_itself: bool,
        again: str,
        stop: Stop,
        saves_interrupted: bool,
        tells: bool = False,
        evaluation: Evaluate | None = None,
        memory: StateInMemory | None = None,
    ) -> None:
        super().__init__()
        self._checkpoints, self._store, self._by_itself = checkpoints, checkpoints.store, by_itself
        self._again, self._stop, self._evaluation = again, stop, evaluation
        self._saves_interrupted, self._tells, self._memory = saves_interrupted, tells, memory
        self._ranking = RankingCheck(None if self._store is None else self._store.ranking, by_itself=by_itself)
        self._has_evaluated = False
        self._beginning: int | None = None
        self._last: int | None = None  # the last step whose metrics are known
        self._waiting = False
        self._owes = False  # whether a save was due in an earlier life, which did not end it

    @property
    def _step(self) -> int:
        return self._checkpoints.held.step

    @contextmanager
    def begun(self) -> Generator[None]:
        """Look into the directory before the run; inside, the ranking hears of saves."""
        if self._store is not None:
            self._store.branch = None
            try:
                self._store.begin()
            except CheckpointSaveError as error:
                # If the directory cannot be written, its checkpoints can still be read.
                if self._by_itself and not self._tells:
                    raise
                if self._by_itself:
                    print_notice(f"{error} The last step of this run is not saved")
                self._by_itself = False
        self._checkpoints.measured.on_save = self._ranking.saved
        try:
            yield
        finally:
            self._checkpoints.measured.on_save = None

    def resume(self, how: Resume) -> DataPosition | None:
        """Go on from a checkpoint, or from a copy in memory; return its position in the data."""
        return (self._memory or self._checkpoints).resume(how)

    def save_resumed(self) -> None:
        """Save the step of a copy in memory that has nothing left to train: no checkpoint may have it."""
        if self._memory is not None and self._memory.has_resumed:
            self.save_last()

    def refuse_later_checkpoints(self) -> None:
        """Before the first step of a run that does not resume, refuse checkpoints of later steps.

        Raises:
          CheckpointSaveError: if the directory holds such checkpoints.
        """
        if self._store is not None and (latest := self._store.latest() or 0) > self._step:
            back = ""
            if self._store.holds(self._step):
                back = f"go back to this step with fit(..., resume={self._step}), "
            raise CheckpointSaveError(
                f"{self._store.directory} holds checkpoints up to step {latest}, and this run begins at step "
                f"{self._step}. Continue the earlier run with fit(..., resume=True), {back}or use another directory: "
                "checkpoints=."
            )

    def on_fit_start(self, trainer: Any) -> None:
        self._beginning = trainer.step
        self._ranking.begin(trainer.callbacks)
        if self._memory is not None:
            self._memory.reserve()
            if self._memory.has_resumed and self._store is not None:
                past = range(self._memory.latest_on_disk + 1, self._step + 1)
                self._owes = any(map(self._store.wants, past))

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        if self._store is not None:
            self._checkpoints.measured.add(record.step, record.metrics)
            self._last = record.step
            self._look_for_metric(record.step)
            self._store.check()
            if self._by_itself and self._step == record.step:  # else a callback has just restored a checkpoint
                self._checkpoints.leave_branch()
            self._waiting = self._evaluation is not None and not self._evaluation.wants(record.step)
            self._save_if_due()

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self._checkpoints.measured.add(step, {f"eval_{name}": value for name, value in metrics.items()})
        self._has_evaluated = True
        if self._last == step:  # else `on_step` adds the metrics of the step
            self._look_for_metric(step)

    def on_next_batch(self) -> None:
        """Save a step that waited: it was not the last one."""
        if self._waiting:
            self._waiting = False
            self._save_if_due()

    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        if error is None or (isinstance(error, SystemExit) and self._stop.is_preempted):
            return self.save_last()
        try:
            if isinstance(error, Exception) and self._stop.is_alone:  # other processes would not come
                self._save_waiting()
        finally:
            self._finish(error)
        if isinstance(error, KeyboardInterrupt):
            self._interrupted(error)
        return None

    def save_last(self) -> None:
        """Wait for the save under way, and save the last step."""
        clock = self._checkpoints.clock
        if self._store is not None:
            with clock.part("save"):
                self._store.wait()  # before a loss may end the run
        with clock.part("device"):
            self._checkpoints.under_way.finish()
        if self._store is None:
            return
        is_saved = self._checkpoints.is_saved()  # every process asks
        if (self._by_itself or self._stop.is_preempted) and self._step > 0 and not is_saved:
            self._checkpoints.save()
            if self._tells:
                self._store.note(self._checkpoints.held.memory)
                self._checkpoints.display.message(
                    f"step {self._step} is saved in {self._store.directory}: a directory alone saves the last step of "
                    "fit, Checkpoints(directory, every=) more often"
                )
        if not self._stop.is_preempted:
            self._ranking.end()

    def tell_preempted(self, then: str) -> None:
        """Say what SIGTERM left, and what happens then."""
        # With several processes, a SIGTERM after the last step comes too late for a save of all of them.
        done = "saved step" if self._store is not None and self._store.holds(self._step) else "did not save step"
        self._checkpoints.display.message(f"SIGTERM: {done} {self._step}, {then}")

    # ------------------------------------------------------------------ after an error

    def _save_waiting(self) -> None:
        """Save a step that waited, if the data or the evaluation at the end failed."""
        if self._evaluation is not None and self._evaluation.at_end:
            self.save_last()
        else:
            self.on_next_batch()

    def _save_if_due(self) -> None:
        if self._memory is not None and not self._waiting:
            self._memory.copy_if_due()
        if self._store is None or self._waiting or not self._by_itself:
            return
        if self._owes or self._store.wants(self._step):
            self._owes = False
            self._checkpoints.save(wait=False)

    def _look_for_metric(self, step: int) -> None:
        names = self._checkpoints.measured.names(step)
        self._ranking.measured(step, names, evaluated=self._has_evaluated)

    def _finish(self, error: BaseException) -> None:
        """Wait for the save under way, and add to the error what to do."""
        if self._store is not None:
            try:
                self._store.finish()
            except CheckpointSaveError as failed:
                if isinstance(error, GeneratorExit):  # nobody sees this error
                    self._checkpoints.display.message(str(failed))
                error.add_note(f"The save under way failed as well: {failed}")
            except ProcessFailedError:
                pass  # this error ends the process
        if isinstance(error, Exception) and self._beginning is not None and self._step > self._beginning:
            error.add_note(self._advice())

    def _advice(self) -> str:
        if self._store is None:
            return after_error(self._step, None, None, self._again)
        try:
            saved = self._store.latest()
        except CheckpointNotFoundError:  # a directory that cannot be read must not hide the error
            saved = None
        return after_error(self._step, saved, self._store.directory, self._again)

    def _interrupted(self, error: BaseException) -> None:
        """After Ctrl-C: save the finished step if all processes come here, and say how to go on."""
        again = f"{self._again} goes on from the latest checkpoint"
        if self._stop.interruption.within_step:
            again = again if self._store is not None else "make a new trainer to start again"
            error.add_note(f"Step {self._step + 1} was interrupted, and its state is lost: {again}.")
        elif not self._saves_interrupted:
            return
        elif self._store is None:
            error.add_note(f"The state in memory is that of step {self._step}: fit goes on from it.")
        elif not (self._stop.is_alone or self._stop.is_interrupted):
            error.add_note(f"Step {self._step} is not saved: only all processes together can save. {again}.")
        elif self._step > 0:
            try:
                self._store.wait()
                if not self._checkpoints.is_saved():
                    self._checkpoints.save()
            except (CheckpointSaveError, NonFiniteLossError) as failed:
                error.add_note(f"Step {self._step} is not saved: {failed}")
            else:
                error.add_note(f"Step {self._step} is saved in {self._store.directory}: {again}.")
