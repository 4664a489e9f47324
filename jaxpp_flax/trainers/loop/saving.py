"""Saving in a training loop: the claim of the directory, the saves of steps, and the end of a loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxpp_flax.checkpoint import CheckpointSaveError, DirectoryInUseError
from jaxpp_flax.checkpoint.shared_directory import check_shared
from jaxpp_flax.processes.comparison import compare_lines
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.ending.preemption import PREEMPTED_STATUS
from jaxpp_flax.trainers.errors import NonFiniteLossError
from jaxpp_flax.trainers.loop.nonfinite import StepsUnderWay
from jaxpp_flax.trainers.loop.progress import Display
from jaxpp_flax.trainers.loop.steps import StepRecord
from jaxpp_flax.trainers.state.holder import StateHolder

__all__ = ["Saving"]


class Saving:
    """A loop's use of the trainer's directory of checkpoints; without a directory, nothing is done.

    Args:
      checkpoints: saves the state.
      held: counts the steps.
      under_way: the steps that devices may still run.
      display: shows messages.
      by_itself: True if the loop saves by itself: when a save is due, and after its last step.
      is_across: True if the ranks belong to several processes.
      meet: a function of the name of a call that every process must make after the same step.
    """

    def __init__(
        self,
        checkpoints: Checkpointing,
        *,
        held: StateHolder,
        under_way: StepsUnderWay,
        display: Display,
        by_itself: bool,
        is_across: bool,
        meet: Callable[[str], None],
    ) -> None:
        self._checkpoints, self._store = checkpoints, checkpoints.store
        self._held, self._under_way, self._display = held, under_way, display
        self._by_itself, self._is_across, self._meet = by_itself, is_across, meet

    @property
    def has_directory(self) -> bool:
        """True if the trainer has a directory of checkpoints."""
        return self._store is not None

    def agree_on_fit(self, *, eval_data: Any, **arguments: Any) -> None:
        """Before the first step, make sure that every process has equal `fit` arguments, and the same directory.

        Args:
          eval_data: only its presence is compared.
          arguments: the other arguments, by name.

        Raises:
          ProgramMismatchError: the message names the first argument that differs, and the processes.
          CheckpointSaveError: if the processes do not see the same directory of checkpoints.
        """
        if not self._is_across:
            return
        self._meet("trainer.fit")
        lines = [
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
            f"{'no' if eval_data is None else 'with'} eval_data",
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
                    if self._by_itself or isinstance(error, DirectoryInUseError):
                        raise
            yield

    def refuse_later_checkpoints(self, *, only_where_it_saves: bool = False) -> None:
        """Refuse checkpoints of later steps, before the first step of a run that does not resume.

        Args:
          only_where_it_saves: do nothing if the loop does not save by itself.

        Raises:
          CheckpointSaveError: if the directory holds checkpoints of later steps.
        """
        if only_where_it_saves and not self._by_itself:
            return
        latest = None if self._store is None else self._store.latest()
        if self._store is not None and latest is not None and latest > self._held.step:
            raise CheckpointSaveError(
                f"{self._store.directory} holds checkpoints up to step {latest}, and this run begins at step "
                f"{self._held.step}. Continue that one with fit(..., resume=True), or use another "
                "directory: checkpoints=."
            )

    def check(self) -> None:
        """Raise the error of a failed save in the background; called before each step.

        Raises:
          CheckpointSaveError: if a save in the background has failed.
        """
        if self._store is not None:
            self._store.check()

    def after_step(self, record: StepRecord) -> None:
        """Save if a save is due; this is a hook."""
        if self._store is not None:
            self._store.check()
            if self._by_itself and self._store.wants(self._held.step):
                self._checkpoints.save(wait=False)

    def finish(self, error: BaseException) -> None:
        """Wait for the save under way, when `fit` ends with an error."""
        if self._store is None:
            return
        try:
            self._store.finish()
        except CheckpointSaveError as failed:
            if isinstance(error, GeneratorExit):  # nobody sees this error
                self._display.message(str(failed))
            error.add_note(f"The save under way failed as well: {failed}")
        except ProcessFailedError:
            return  # this error ends the process

    def interrupted(self, error: BaseException, *, whole: bool, together: bool) -> None:
        """After Ctrl-C: save the finished step if all processes come here, and say how to go on."""
        again = "fit(resume=True) goes on from the latest checkpoint"
        if not whole:
            again = again if self._store is not None else "a new trainer begins anew"
            error.add_note(f"Step {self._held.step + 1} was interrupted, and its state is lost: {again}.")
        elif self._store is None:
            error.add_note(f"The state in memory is that of step {self._held.step}: fit goes on from it.")
        elif not together:
            error.add_note(f"Step {self._held.step} is not saved, for which all processes must agree. {again}.")
        elif self._held.step > 0:
            try:
                self._store.wait()
                if not self._checkpoints.is_saved():
                    self._checkpoints.save()
            except (CheckpointSaveError, NonFiniteLossError) as failed:
                error.add_note(f"Step {self._held.step} is not saved: {failed}")
            else:
                error.add_note(f"Step {self._held.step} is saved in {self._store.directory}: {again}.")

    def end(self, preempted: Callable[[], bool]) -> None:
        """Wait for the save under way, save the last step, and exit if SIGTERM asked for it."""
        if self._store is not None:
            self._store.wait()  # before a loss may end the run
        self._under_way.finish(self._display.meter)
        due = self._by_itself or preempted()
        if self._store is None:
            return
        saved = self._checkpoints.is_saved()
        if due and self._held.step > 0 and not saved:
            self._checkpoints.save()
        if preempted():
            self._display.message(f"SIGTERM: saved step {self._held.step}, exiting with status {PREEMPTED_STATUS}")
            raise SystemExit(PREEMPTED_STATUS)
