"""Saving in a training loop: who may write to the directory, when a step is saved, and how a loop ends."""

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
    """What a loop does with the trainer's directory of checkpoints; without one, nothing.

    Args:
      checkpoints: save.
      held: counts the steps.
      under_way: the steps that devices may still work at.
      display: gets messages.
      by_itself: whether the loop saves: when it is time, and after its last step.
      is_across: whether the ranks belong to several processes.
      meet: is called with the name of a call that every process must make after the same step.
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
        """Whether there is a directory of checkpoints."""
        return self._store is not None

    def agree_on_fit(self, *, eval_data: Any, **arguments: Any) -> None:
        """Before the first step, make sure that every process does the same in `fit`, and saves to the same place.

        Args:
          eval_data: whether there is any is compared.
          arguments: the others, by name.

        Raises:
          ProgramMismatchError: naming the first argument that differs, and the processes.
          CheckpointSaveError: if they do not see one directory of checkpoints.
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
                    # Where nothing can be written, checkpoints can still be read.
                    if self._by_itself or isinstance(error, DirectoryInUseError):
                        raise
            yield

    def refuse_later_checkpoints(self, *, only_where_it_saves: bool = False) -> None:
        """Before the first step of a run that resumes none.

        Args:
          only_where_it_saves: do nothing where the loop does not save by itself.

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
        """Before a step.

        Raises:
          CheckpointSaveError: if a save in the background has failed.
        """
        if self._store is not None:
            self._store.check()

    def after_step(self, record: StepRecord) -> None:
        """A hook: save where it is time."""
        if self._store is not None:
            self._store.check()
            if self._by_itself and self._store.wants(self._held.step):
                self._checkpoints.save(wait=False)

    def finish(self, error: BaseException) -> None:
        """Wait for what is being written, where `fit` ends by an error."""
        if self._store is None:
            return
        try:
            self._store.finish()
        except CheckpointSaveError as failed:
            if isinstance(error, GeneratorExit):  # which nobody sees
                self._display.message(str(failed))
            error.add_note(f"The save under way failed as well: {failed}")
        except ProcessFailedError:
            return  # this process ends by that

    def interrupted(self, error: BaseException, *, whole: bool, together: bool) -> None:
        """After Ctrl-C: save the step that is done, where all processes come here, and say how to go on."""
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
        """Wait for what is being written, save the last step, and exit if that was asked for."""
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
