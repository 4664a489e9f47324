"""The trainer's checkpoints: what a step's directory holds, when it is written, and how a run goes on from it."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import jax

from jaxpp_flax.checkpoint import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    DirectoryInUseError,
    UnfinishedCheckpointError,
)
from jaxpp_flax.checkpoint.format.integrity import describe_checkpoint
from jaxpp_flax.checkpoint.format.paths import PathFilter, shortened
from jaxpp_flax.checkpoint.reading import RestorePlan, plan_restore
from jaxpp_flax.checkpoint.shared_directory import check_shared
from jaxpp_flax.checkpoint.store import CheckpointStore, read_json, save_step
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.processes.comparison import compare_lines, exchange_values, from_process_that_has_it
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.callbacks.base import named
from jaxpp_flax.trainers.data.position import DataPosition, Drawn, own_position, together
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.errors import NonFiniteLossError
from jaxpp_flax.trainers.loop.nonfinite import OnNonFinite, StepsUnderWay, check_parameters
from jaxpp_flax.trainers.loop.preemption import PREEMPTED_STATUS
from jaxpp_flax.trainers.loop.process_synchronization import BatchComparison
from jaxpp_flax.trainers.loop.progress import Meter
from jaxpp_flax.trainers.options import Checkpoints
from jaxpp_flax.trainers.state.parameter_copies import with_copies
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.update import Update

__all__ = ["Checkpointed", "Resume", "check_resume"]

Resume = bool | Literal["latest_valid"]

_DAMAGE = (CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError)


def check_resume(value: object) -> None:
    """Refuse what `fit(resume=)` does not know.

    Raises:
      ValueError: naming it.
    """
    if not isinstance(value, bool) and value != "latest_valid":
        raise ValueError(f'resume={value!r}: it must be True, False or "latest_valid".')


class Checkpointed(abc.ABC):
    """The part of `PipelineTrainer` that saves and restores. A step's directory holds, as items of Orbax:

    - `state`: the `TrainState` (parameters, optimizer, other variables, keys of random numbers, step), by logical path;
    - `data`: where the run stands in its data;
    - `callbacks`: what those of `fit` keep, such as the patience of `EarlyStopping`;
    - `about`: the name of the model.
    """

    _state: TrainState
    _update: Update
    _placed: bool
    _unread: Path | None
    _step: int
    _meter: Meter
    _under_way: StepsUnderWay
    _on_nonfinite: OnNonFinite
    _trained_on: BatchComparison
    _model_name: str
    _resumed_callbacks: dict[str, Any] | None

    @property
    @abc.abstractmethod
    def state(self) -> TrainState: ...

    @abc.abstractmethod
    def _with_weights(self) -> TrainState: ...

    @abc.abstractmethod
    def _forget_first(self) -> None: ...

    @abc.abstractmethod
    def _call_together(self, call: str) -> None: ...

    @property
    @abc.abstractmethod
    def _is_across(self) -> bool: ...

    def _init_checkpoints(self, options: Checkpoints | None) -> None:
        self._store = (
            None
            if options is None
            else CheckpointStore(
                options.directory, every=options.every, keep=options.keep, asynchronous=options.asynchronous
            )
        )
        self._saves_by_itself = options is not None and options.every is not None
        self._preemption_deadline = None if options is None else options.preemption_deadline
        self._source: Batches | None = None
        self._last_source: Batches | None = None  # of the last `fit`, whatever was restored since
        self._source_begin = 0
        self._position: tuple[int, DataPosition] | None = None  # with the step that it belongs to
        self._callbacks: Sequence[Callback] = ()  # of the last `fit`

    # ------------------------------------------------------------------ for users

    def save(self, where: str | os.PathLike[str] | int | None = None, *, wait: bool = True) -> Path:
        """Write a checkpoint of the whole run: state, random numbers, step, and the position in the data.

        Args:
          where: None or the current step for the trainer's directory; or a path of its own.
          wait: until it is complete. With False it is written in the background, and training may go on: a failure
            is raised by the next step. Paths of their own are always waited for.

        Returns:
          The checkpoint's directory.

        Raises:
          CheckpointSaveError: if it cannot be written; the state and older checkpoints are untouched.
          NonFiniteLossError: if losses or parameters are not finite, unless `on_nonfinite="ignore"` or `where` is a
            path.
        """
        self._call_together("trainer.save")
        self._trained_on.check(self._step)
        with process_group().waiting(f"the save of step {self._step}"):
            data = together(self._data_json())
        beside = {"data": data, "about": {"model": self._model_name}}
        if states := {
            name: state for name, c in named(self._callbacks).items() if (state := c.get_state()) is not None
        }:
            beside["callbacks"] = states
        if where is not None and not isinstance(where, int):
            return save_step(where, self.state, beside)
        store = self._need_store("save")
        if where is not None and where != self._step:
            raise ValueError(f"save({where}): the state in memory is that of step {self._step}. Save that one.")
        if self._on_nonfinite != "ignore":  # a bad checkpoint would take the place of a good one
            self._under_way.finish(self._meter)
            check_parameters(self._step, self._state.params)
        store.save(self._step, self.state, beside, wait=wait)
        return store.directory / str(self._step)

    def restore(
        self,
        where: str | os.PathLike[str] | int = "latest",
        *,
        only: PathFilter | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Literal["error", "keep"] = "error",
        low_memory: bool = False,
    ) -> None:
        """Take over a checkpoint's state, whatever the layout of the run that wrote it.

        Before a step is compiled it goes to the default device; after `compile(batch)`, or in `fit(resume=True)`,
        each leaf goes straight to its ranks.

        Args:
          where: a step in the trainer's directory, its "latest", or the path of any Orbax checkpoint of a tree.
          only: leaves to take, by their paths in `trainer.state`: `"params/*"` for the weights alone. What holds copies
            of the weights (their average, `z` of schedule-free) takes the restored values too, unless `only` names it.
          rename: prefixes of paths, from `trainer.state` to the checkpoint: `{"params": ""}` for a checkpoint that
            stock Orbax wrote of an unpipelined model's parameters.
          missing: "keep" what the checkpoint lacks.
          low_memory: give up the state in memory before the new one is read, so that they are never both there. All
            that is checked is checked before: paths, shapes, dtypes, and the digests of all files. Should a file be
            unreadable after that, no state is left, and another restore is needed.

        Raises:
          CheckpointMismatchError: listing all leaves that do not fit.
          CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if it cannot be read. The state
            in memory is as it was, after any of these.
        """
        self._call_together("trainer.restore")
        path: Any = where
        if isinstance(where, int) or where == "latest":
            store = self._need_store("restore")
            store.wait()  # a save under way may be the one
            if where == "latest":
                latest = _latest(store)
                path = store.path("latest" if latest is None else latest)
            else:
                path = store.path(int(path))
        if self._is_across:
            lines = [describe_checkpoint(path), f"rename={rename}", f"missing={missing}", f"low_memory={low_memory}"]
            lines.append(f"only={'a function' if callable(only) else only}")
            compare_lines(process_group(), "what to restore", lines, None)
        plan = self._plan(path, only, rename, missing)
        if only is not None or missing == "keep":
            plan, following = with_copies(plan, self._state, self._update.tx.init)
            if following:
                self._meter.message(f"copies of parameters take their restored values too: {shortened(following, 3)}")
        position = own_position(read_json(path, "data"))
        if low_memory:
            self._release(plan)
        try:
            self._state = plan.read()
        except CorruptCheckpointError as error:
            if not low_memory:
                raise
            raise CorruptCheckpointError(
                f"{error} The state in memory was given up for it (low_memory=True): restore one before training."
            ) from error
        self._forget_first()
        step: Any = self._state.step
        known = None if isinstance(step, MpmdArray) and not step.is_partially_addressable else int(step)
        self._take_position(
            from_process_that_has_it(process_group(), "the step of the checkpoint", known),
            None if only is not None else position,
        )

    def _plan(
        self, path: Path, only: PathFilter | None, rename: Mapping[str, str] | None, missing: Literal["error", "keep"]
    ) -> RestorePlan:
        """Compare a checkpoint with the state, and its files with their digests."""
        whole = only is None and missing == "error"
        target = self._state if whole else self.state  # what is not restored keeps its value
        about = read_json(path, "about") or {}
        try:
            # A checkpoint that is not a trainer's may hold whatever else.
            extra = "ignore" if rename else "error"
            return plan_restore(path, target, only=only, rename=rename, missing=missing, extra=extra)
        except CheckpointMismatchError as error:
            if about.get("model", self._model_name) == self._model_name:
                raise
            raise CheckpointMismatchError(
                f"{error.message} It was written for the model {about['model']}; this trainer has {self._model_name}.",
                error.faults,
            ) from None

    def _release(self, plan: RestorePlan) -> None:
        """Give up the memory of what `plan` replaces; the user's own arrays, which the first state is, are let be."""
        if not self._placed:
            return
        self._under_way.clear()
        for leaf in plan.replaced():
            if isinstance(leaf, (jax.Array, MpmdArray)):
                leaf.delete()

    def _take_position(self, step: int, position: DataPosition | None) -> None:
        self._step = step
        self._source = None
        self._position = None if position is None else (step, position)
        self._under_way.clear()

    # ------------------------------------------------------------------ for `fit`

    def _resume(self, how: Resume) -> DataPosition | None:
        """Restore the latest checkpoint, if there is one; where its data stood."""
        store = self._need_store("fit(resume=True)")
        store.wait()  # a save under way may be the latest
        before, aside = self._step, list[Path]()
        while (latest := _latest(store)) is not None:
            path = store.path(latest)
            try:
                self._take_over(path)
            except _DAMAGE as error:
                if how != "latest_valid":
                    raise type(error)(
                        f'{error} fit(resume="latest_valid") sets {path} aside and goes on from the newest whole one.'
                    ) from error
                aside.append(store.set_aside(latest))
                self._meter.message(f"{error} It is now {aside[-1]}.")
            else:
                break
        if latest is None:
            self._resumed_callbacks = None
            if aside:
                names = ", ".join(path.name for path in aside)
                raise CheckpointNotFoundError(
                    f"{store.directory} holds no whole checkpoint: set aside are {names}. Begin anew in another "
                    "directory, or restore a checkpoint from elsewhere."
                )
            return self._data_position()
        later = (
            f"; what was trained after it, up to step {before}, was not saved and is given up"
            if before > latest
            else ""
        )
        self._meter.message(f"resumed from {path}, step {latest}{later}")
        if self._position is None:
            self._meter.message("the checkpoint holds no position in the data, which begins anew")
            return None
        return self._position[1]

    def _take_over(self, path: Path) -> None:
        """Make a step's checkpoint the state: now, or when the step is compiled, which tells where to."""
        self._resumed_callbacks = read_json(path, "callbacks") or {}
        if self._placed:
            return self.restore(int(path.name))
        self._plan(path, None, None, "error")
        self._take_position(int(path.name), own_position(read_json(path, "data")))
        self._unread = path
        return None

    def _begin_callbacks(self, callbacks: Sequence[Callback], *, resumed: bool) -> None:
        """Each begins anew, or goes on as the checkpoint says; without one, as it is."""
        states = self._resumed_callbacks if resumed else {}
        for name, callback in named(callbacks).items():
            callback.set_state(callback.get_state() if states is None else states.get(name))
        self._callbacks = callbacks

    def _agree_on_fit(self, *, eval_data: Any, **arguments: Any) -> None:
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
        self._call_together("trainer.fit")
        lines = [
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
            f"{'no' if eval_data is None else 'with'} eval_data",
            "no checkpoints" if self._store is None else f"checkpoints, {self._store.describe()}",
        ]
        compare_lines(process_group(), "the arguments of fit", lines, None)
        if self._store is not None:
            check_shared(self._store.directory)

    @contextmanager
    def _owned(self) -> Generator[None]:
        """Keep other jobs from writing to the directory of checkpoints."""
        with ExitStack() as claim:
            if self._store is not None:
                try:
                    claim.enter_context(self._store.owned())
                except CheckpointSaveError as error:
                    # Where nothing can be written, checkpoints can still be read.
                    if self._saves_by_itself or isinstance(error, DirectoryInUseError):
                        raise
            yield

    def _refuse_later_checkpoints(self) -> None:
        latest = None if self._store is None else self._store.latest()
        if self._store is not None and latest is not None and latest > self._step:
            raise CheckpointSaveError(
                f"{self._store.directory} holds checkpoints up to step {latest}, and this run begins at step "
                f"{self._step}. Continue that one with fit(..., resume=True), or use another directory: checkpoints=."
            )

    def _track(self, source: Batches) -> Batches:
        """From now on, batches come from `source`."""
        self._source = self._last_source = source
        self._source_begin = self._step
        return source

    def _drawn_from(self, data: Any) -> Drawn | Literal[0]:
        return 0 if self._last_source is None else self._last_source.drawn_from(data)

    def _leave(self, source: Batches) -> None:
        """Batches come from `source` no longer: a step that follows is none of its."""
        if self._source is source:
            position = self._data_position()
            self._source, self._position = None, None if position is None else (self._step, position)

    def _check_saves(self) -> None:
        if self._store is not None:
            self._store.check()

    def _after_step(self) -> None:
        """Save where it is time."""
        if self._store is not None:
            self._store.check()
            if self._saves_by_itself and self._store.wants(self._step):
                self.save(wait=False)

    def _finish_saves(self, error: BaseException) -> None:
        """Wait for what is being written, where `fit` ends by an error."""
        if self._store is None:
            return
        try:
            self._store.finish()
        except CheckpointSaveError as failed:
            if isinstance(error, GeneratorExit):  # which nobody sees
                self._meter.message(str(failed))
            error.add_note(f"The save under way failed as well: {failed}")
        except ProcessFailedError:
            return  # this process ends by that

    def _save_interrupted(self, error: BaseException, *, whole: bool, together: bool) -> None:
        """After Ctrl-C: save the step that is done, where all processes come here, and say how to go on."""
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
                if not self._is_saved():
                    self.save()
            except (CheckpointSaveError, NonFiniteLossError) as failed:
                error.add_note(f"Step {self._step} is not saved: {failed}")
            else:
                error.add_note(f"Step {self._step} is saved in {self._store.directory}: {again}.")

    def _end_fit(self, preempted: Callable[[], bool]) -> None:
        """Wait for what is being written, save the last step, and exit if that was asked for."""
        if self._store is not None:
            self._store.wait()  # before a loss may end the run
        self._under_way.finish(self._meter)
        due = self._saves_by_itself or preempted()
        if self._store is None:
            return
        saved = self._is_saved()
        if due and self._step > 0 and not saved:
            self.save()
        if preempted():
            self._meter.message(f"SIGTERM: saved step {self._step}, exiting with status {PREEMPTED_STATUS}")
            raise SystemExit(PREEMPTED_STATUS)

    def _is_saved(self) -> bool:
        """Whether the step in memory is, as process 0 sees it: another one may not see the last save yet."""
        return exchange_values(
            process_group(), "whether the last step is saved", self._step in self._need_store("fit").steps()
        )[0]

    def _data_json(self) -> Any:
        position = self._data_position()
        return None if position is None else position.to_json()

    def _data_position(self) -> DataPosition | None:
        """Where the data stands after the step in memory, as far as that is known."""
        if self._source is not None:
            # Steps that the user took with other batches leave no position; a batch may wait for its step.
            return self._source.position(self._step - self._source_begin)
        at_step, position = self._position or (None, None)
        return position if at_step == self._step else None

    def _need_store(self, what: str) -> CheckpointStore:
        if self._store is None:
            raise CheckpointNotFoundError(
                f"{what} needs a directory of checkpoints: give the trainer checkpoints=, or pass a path."
            )
        return self._store


def _latest(store: CheckpointStore) -> int | None:
    """The latest step as process 0 sees it: on a shared disk another process may not see it yet."""
    return exchange_values(process_group(), "the latest step", store.latest())[0]
