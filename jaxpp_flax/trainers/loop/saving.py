"""Saving in a training loop: the claim of the directory, the saves of steps, and the end of a loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CheckpointSaveError, DirectoryInUseError
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.shared_directory import check_shared
from jaxpp_flax.processes.comparison import compare_lines
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.ending.preemption import PREEMPTED_STATUS
from jaxpp_flax.trainers.errors import NonFiniteLossError
from jaxpp_flax.trainers.loop.hooks import StepRecord
from jaxpp_flax.trainers.metrics.summary import after_error

__all__ = ["Saving"]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A loop's use of the trainer's directory of checkpoints; without a directory, nothing is done.

    Args:
      checkpoints: saves the state.
      by_itself: True if the loop saves by itself: when a save is due, and after its last step.
    """

    checkpoints: Checkpointing
    by_itself: bool

    @property
    def _step(self) -> int:
        return self.checkpoints.held.step

    @property
    def _store(self) -> CheckpointStore | None:
        return self.checkpoints.store

    def agree_on_fit(self, arguments: Mapping[str, Any], *, evaluates: bool) -> None:
        """Before the first step, make sure that every process has equal `fit` arguments, and the same directory.

        Raises:
          ProgramMismatchError: the message names the first argument that differs, and the processes.
          CheckpointSaveError: if the processes do not see the same directory of checkpoints.
        """
        if not self.checkpoints.is_across:
            return
        self.checkpoints.meet("trainer.fit")
        lines = [
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
            f"{'with' if evaluates else 'no'} eval_data",
            "no checkpoints" if self._store is None else f"checkpoints, {self._store.describe()}",
        ]
        compare_lines(process_group(), "the arguments of fit", lines, None)
        if self._store is not None:
            check_shared(self._store.directory)

    @contextmanager
    def owned(self) -> Generator[None]:
        """Keep other jobs from writing to the directory of checkpoints."""
        with ExitStack() as claim:
            if self._store is not None:
                try:
                    claim.enter_context(self._store.owned())
                except CheckpointSaveError as error:
                    # If the directory cannot be written, its checkpoints can still be read.
                    if self.by_itself or isinstance(error, DirectoryInUseError):
                        raise
            yield

    def refuse_later_checkpoints(self) -> None:
        """Before the first step of a run that does not resume, refuse checkpoints of later steps.

        Raises:
          CheckpointSaveError: if the directory holds such checkpoints.
        """
        if self._store is not None and (latest := self._store.latest() or 0) > self._step:
            raise CheckpointSaveError(
                f"{self._store.directory} holds checkpoints up to step {latest}, and this run begins at step "
                f"{self._step}. Continue that one with fit(..., resume=True), or use another "
                "directory: checkpoints=."
            )

    def check(self) -> None:
        """Raise a `CheckpointSaveError` if a save in the background has failed; called before each step."""
        if self._store is not None:
            self._store.check()

    def after_step(self, record: StepRecord, *, saves: bool = True) -> None:
        """Save if a save is due; this is a hook. With `saves=False`, the step is saved at the end instead."""
        if self._store is not None:
            self.checkpoints.measured.add(record.step, record.metrics)
            self._store.check()
            if saves and self.by_itself and self._store.wants(self._step):
                self.checkpoints.save(wait=False)

    def has_saved_last(self) -> bool:
        """Return True if the latest step is saved, or a save of it is under way."""
        return self._store is not None and self._store.holds(self._step)

    def finish(self, error: BaseException, beginning: int, again: str) -> None:
        """After an error of a loop, wait for the save under way, and add to the error what to do.

        Args:
          beginning: the step before the first one of the loop.
          again: the call that goes on from a checkpoint.
        """
        self._finish_save(error)
        if isinstance(error, Exception) and self._step > beginning:
            error.add_note(self._advice(again))

    def _finish_save(self, error: BaseException) -> None:
        if self._store is None:
            return
        try:
            self._store.finish()
        except CheckpointSaveError as failed:
            if isinstance(error, GeneratorExit):  # nobody sees this error
                self.checkpoints.display.message(str(failed))
            error.add_note(f"The save under way failed as well: {failed}")
        except ProcessFailedError:
            return  # this error ends the process

    def _advice(self, again: str) -> str:
        if self._store is None:
            return after_error(self._step, None, None, again)
        try:
            saved = self._store.latest()
        except CheckpointNotFoundError:  # a directory that cannot be read must not hide the error
            saved = None
        return after_error(self._step, saved, self._store.directory, again)

    def interrupted(self, error: BaseException, *, whole: bool, together: bool) -> None:
        """After Ctrl-C: save the finished step if all processes come here, and say how to go on."""
        again = "fit(resume=True) goes on from the latest checkpoint"
        if not whole:
            again = again if self._store is not None else "a new trainer begins anew"
            error.add_note(f"Step {self._step + 1} was interrupted, and its state is lost: {again}.")
        elif self._store is None:
            error.add_note(f"The state in memory is that of step {self._step}: fit goes on from it.")
        elif not together:
            error.add_note(f"Step {self._step} is not saved, for which all processes must agree. {again}.")
        elif self._step > 0:
            try:
                self._store.wait()
                if not self.checkpoints.is_saved():
                    self.checkpoints.save()
            except (CheckpointSaveError, NonFiniteLossError) as failed:
                error.add_note(f"Step {self._step} is not saved: {failed}")
            else:
                error.add_note(f"Step {self._step} is saved in {self._store.directory}: {again}.")

    def end(self, preempted: Callable[[], bool]) -> None:
        """Wait for the save under way, and save the last step."""
        clock = self.checkpoints.clock
        if self._store is not None:
            with clock.part("save"):
                self._store.wait()  # before a loss may end the run
        with clock.part("device"):
            self.checkpoints.under_way.finish()
        due = self.by_itself or preempted()
        if self._store is None:
            return
        is_saved = self.checkpoints.is_saved()  # every process asks
        if due and self._step > 0 and not is_saved:
            self.checkpoints.save()

    def exit_preempted(self) -> None:
        """End the process after SIGTERM, if there is a directory."""
        if self._store is not None:
            # With several processes, a SIGTERM after the last step comes too late for a save of all of them.
            done = "saved step" if self.has_saved_last() else "did not save step"
            self.checkpoints.display.message(f"SIGTERM: {done} {self._step}, exiting with status {PREEMPTED_STATUS}")
            raise SystemExit(PREEMPTED_STATUS)
