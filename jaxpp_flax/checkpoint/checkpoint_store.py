"""A directory of checkpoints by step, written in the background by Orbax's `CheckpointManager`."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxpp_flax.checkpoint.barriers import background_barrier, poll, shared_work
from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.checkpoint.errors import CheckpointNotFoundError, CheckpointSaveError, DirectoryInUseError
from jaxpp_flax.checkpoint.finish_at_exit import finish_at_exit
from jaxpp_flax.checkpoint.format.locations import checkpoint_location, is_on_disk
from jaxpp_flax.checkpoint.format.orbax_io import TMP_MARK, is_complete, multiprocessing_options, short, under_way
from jaxpp_flax.checkpoint.one_writer import WRITER, own_writer, refuse_another_writer, try_to_write
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.checkpoint.shared_directory import check_shared
from jaxpp_flax.checkpoint.writing import save_failed, step_arguments, step_registry, to_tree
from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes.comparison import do_in_process_0, exchange_values, found_by_process_0
from jaxpp_flax.processes.group import process_group

SavePolicy: TypeAlias = int | policies.SaveDecisionPolicy
"""An interval in steps, or an Orbax save decision policy."""
KeepPolicy: TypeAlias = int | policies.PreservationPolicy
"""The number of latest checkpoints to keep, or an Orbax preservation policy."""

# The seconds that a failed process waits for the other processes' parts of a save.
_PATIENCE = 60.0


class _Manager(ocp.CheckpointManager):
    """Orbax's manager. It reads the metrics of all steps: a step whose file is damaged is one without metrics."""

    def metrics(self, step: int) -> Any:
        try:
            return super().metrics(step)
        except Exception as error:
            warn_user(
                f"the metrics of the checkpoint of step {step} cannot be read, so it counts as one without metrics: "
                f"{self.directory / str(step) / 'metrics'}: {short(error)}. Saves go on; delete this checkpoint, or "
                "set it aside."
            )
            return None


class CheckpointStore:
    """Checkpoints of one run: `directory/<step>`, each with a tree of arrays and some JSON.

    The first save makes the directory. `every=None` writes explicit saves only, and `keep=None` keeps all checkpoints.
    With `asynchronous`, `save` only copies to the host, and the rest is done in the background.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jaxpp_flax.checkpoint.reading import read_json
      >>> store = CheckpointStore(tempfile.mkdtemp(), every=2, keep=2)
      >>> for step in range(1, 8):
      ...     if store.wants(step):
      ...         store.save(step, {"w": jnp.ones(2) * step}, {"about": {"step": step}})
      >>> store.wait()
      >>> store.steps(), store.latest(), read_json(store.path(6), "about")
      ((4, 6), 6, {'step': 6})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        best: Best | None = None,
        asynchronous: bool = True,
    ) -> None:
        self.directory = checkpoint_location(directory)
        self._every, self._keep = every, keep
        self.ranking, self._asynchronous = best, asynchronous
        self._manager: ocp.CheckpointManager | None = None
        self._writing: int | None = None  # the step whose save is under way
        self._saving = -1  # the last step whose save was begun
        self._finishes_at_exit = False
        self._noted: weakref.ref[Any] | None = None
        self.branch: int | None = None
        """The step that a loop has gone back to; checkpoints of later steps are not of this run any more."""
        self._present: set[int] | None = None  # the steps that were there before the run, or that it has saved
        self._remains: list[Path] = []  # what saves that were cut off left

    def begin(self) -> None:
        """Note what is in the directory before a run, and that it can be written; all processes call this.

        Raises:
          CheckpointSaveError: if the directory cannot be written.
        """

        def look() -> tuple[int, ...]:
            try:
                try_to_write(self.directory)
                self._remains = self._unfinished()
                return self._list()
            except OSError as error:
                raise save_failed(self.directory, error) from error

        what = "the look into the checkpoint directory"
        self._present = {*found_by_process_0(process_group(), what, look, CheckpointSaveError)}

    def refuse_another_writer(self, step: int | None = None) -> None:
        """Refuse checkpoints that have appeared since `begin`, of another job; before a save, later ones of this run.

        All processes call this.

        Raises:
          DirectoryInUseError: naming the step and its writer.
          CheckpointSaveError: if there are later checkpoints than the step to save.
        """
        if self._present is None:
            self.begin()
        known: set[int] = set() if self._present is None else self._present

        def look() -> list[int]:
            try:
                steps = self._list()
            except OSError as error:
                raise save_failed(self.directory, error) from error
            appeared = sorted({*steps} - known)
            refuse_another_writer(self.directory, appeared)
            if step is not None and (latest := max(steps, default=-1)) >= step:
                what = "is a checkpoint of it" if latest == step else f"are later ones, up to step {latest}"
                raise CheckpointSaveError(
                    f"cannot save step {step} to {self.directory}: there {what}, and nothing there is touched. Choose "
                    "another checkpoint directory, save to a path of its own, or delete what is there."
                )
            return appeared

        what = "the look for another writer"
        known.update(found_by_process_0(process_group(), what, look, DirectoryInUseError, CheckpointSaveError))

    def describe(self) -> str:
        """Describe the steps to save and to keep, such as "every=2, keep=3", with the same text in every process."""
        named = {"every": self._every, "keep": self._keep, **({} if self.ranking is None else vars(self.ranking))}
        plain = {
            name: of if of is None or isinstance(of, (int, str)) else type(of).__name__ for name, of in named.items()
        }
        return ", ".join(f"{name}={of}" for name, of in plain.items())

    def steps(self) -> tuple[int, ...]:
        """Return the steps with complete checkpoints, ascending; saves that were cut off are left out."""
        try:
            return self._list()
        except OSError as error:
            raise CheckpointNotFoundError(
                f"{self.directory} cannot be read: {error}. Check its permissions."
            ) from error

    def _list(self) -> tuple[int, ...]:
        if not self.directory.is_dir():
            return ()
        return tuple(sorted(int(path.name) for path in self._directories() if is_complete(path)))

    def _directories(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if path.name.isdigit() and path.is_dir()]

    def _unfinished(self) -> list[Path]:
        """Return what saves that were cut off left; it may be of a save that another job has under way."""
        if is_on_disk(self.directory):
            return list(self.directory.glob(f"*{TMP_MARK}*"))
        if not self.directory.is_dir():  # in a bucket, a directory is there once it holds something
            return []
        return [path for path in self._directories() if not is_complete(path)]

    def latest(self) -> int | None:
        """Return the last step with a complete checkpoint; None without one."""
        return max(self.steps(), default=None)

    def path(self, step: int | None) -> Path:
        """Return the directory of a step; refuse None, which `latest` returns without a checkpoint."""
        if step is None:
            raise CheckpointNotFoundError(
                f"{self.directory} holds no complete checkpoint yet. Save one first (`trainer.save()`, or "
                "`every=`), or check that this is the directory that the run wrote to."
            )
        steps = self.steps()
        if step not in steps:
            raise CheckpointNotFoundError(
                f"{self.directory} has no checkpoint of step {step}; it has {', '.join(map(str, steps)) or 'none'}."
            )
        return self.directory / str(step)

    def holds(self, step: int) -> bool:
        """Return True if there is a checkpoint of this step of the run, or a save of it is under way."""
        return self._writing == step or (self._is_present(step) and step in self.steps())

    def _is_present(self, step: int) -> bool:
        """Return True for a step that was there before the run, or that it has saved: the same in every process."""
        return step in (self.steps() if self._present is None else self._present)

    def wants(self, step: int) -> bool:
        """Return True if `every` asks for a checkpoint of this step, and this run has none yet."""
        if self._every is None:
            return False
        due = step % self._every == 0 if isinstance(self._every, int) else self._open().should_save(step)
        return due and not self._is_present(step)

    def best(self) -> int | None:
        """Return the step with the best metric, of the complete checkpoints; None if no checkpoint has the metric."""
        best = self.ranking
        if best is None:
            raise CheckpointNotFoundError(
                f'{self.directory}: "best" needs the name of a metric: Checkpoints(..., best="eval_loss").'
            )
        values = {step: best.value(read_json(self.directory / str(step), "metrics")) for step in self.steps()}
        known = {step: value for step, value in values.items() if math.isfinite(value)}
        return max(known, key=lambda step: (best.order(known[step]), step), default=None)

    def metric_names(self) -> list[str]:
        """Return the names of the metrics that complete checkpoints have."""
        found = (read_json(self.directory / str(step), "metrics") or {} for step in self.steps())
        return sorted({name for metrics in found for name in metrics})

    def save(
        self,
        step: int,
        tree: Any,
        beside: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Begin a save, after the end of an earlier save; return when the arrays may change.

        Args:
          metrics: of this step, for `best`, for Orbax's policies, and for readers of the checkpoint.
        """
        if metrics is None and (self._keep is None or isinstance(self._keep, int)):
            metrics = {}  # else Orbax prints a warning; a policy of the user's may look into metrics that exist
        self.wait()
        self.refuse_another_writer(step)
        content = to_tree(tree)
        self._saving = step
        if self._present is not None:
            self._present.add(step)
        with shared_work(self._what(), lambda error: self._failed(step, error), everywhere=True):
            manager = self._open()
            # Orbax would count checkpoints that somebody has deleted among those to keep.
            gone = sorted({*manager.all_steps()} - {*self._list()})
            if exchange_values(process_group(), "which steps were deleted", gone)[0]:
                manager.reload()
        with shared_work(self._what(), lambda error: self._failed(step, error)):
            self._writing = step
            items = step_arguments(content, {**beside, WRITER: own_writer()})
            manager.save(step, args=items, metrics=metrics, force=True)
        if wait or not self._asynchronous:
            self.wait()
        elif not self._finishes_at_exit:
            finish_at_exit(self)
            self._finishes_at_exit = True

    def note(self, tree: Any) -> None:
        """Note that the last save was of this very tree; see `is_noted`."""
        self._noted = weakref.ref(tree)

    def is_noted(self, tree: Any) -> bool:
        """Return True if `tree` is the one of `note`."""
        return self._noted is not None and self._noted() is tree

    def check(self) -> None:
        """Raise the error of a save in the background since the last call, if any; never wait. Call it at each step."""
        if self._writing is not None and not self.is_writing():
            self.wait()

    def is_writing(self) -> bool:
        """Return True if a save runs in the background."""
        return self._manager is not None and self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Wait for the save under way."""
        if self._writing is None or self._manager is None:
            return
        step, manager = self._writing, self._manager
        with shared_work(f"the end of {self._what()}", lambda error: self._failed(step, error)):
            poll(manager.is_saving_in_progress)
            manager.wait_until_finished()
        self._written()

    def finish(self) -> None:
        """Wait for the save under way when this process fails: other processes may never write their parts."""
        group = process_group()
        if group.process_count == 1:
            return self.wait()
        end = time.monotonic() + _PATIENCE
        with group.waiting(f"the end of {self._what()}"):
            while self.is_writing():
                group.check()
                if time.monotonic() > end:
                    raise CheckpointSaveError(
                        f"{self._what()} was not complete {_PATIENCE:.0f} s after this process had failed, and is "
                        "given up: other processes have not written their parts of it. Older checkpoints are whole."
                    )
                group.failed.wait(0.02)
        return self.wait()

    def set_aside(self, step: int, why: Literal["damaged", "abandoned"] = "damaged") -> Path:
        """Rename a checkpoint so that its name is not a step; return its new path."""
        self.close()
        path = self.directory / f"{step}.{why}"
        number = 2
        while path.exists():
            path, number = self.directory / f"{step}.{why}_{number}", number + 1
        # All processes use the name that process 0 chose before the rename.
        path = (
            self.directory / exchange_values(process_group(), f"the name of a checkpoint that is {why}", path.name)[0]
        )
        do_in_process_0(
            process_group(),
            "setting a checkpoint aside",
            lambda: (self.directory / str(step)).rename(path),
            OSError,
        )
        if self._present is not None:
            self._present.discard(step)
        return path

    def close(self) -> None:
        """Wait for the save under way, and end Orbax's threads; a later save opens the directory again."""
        self.wait()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()

    def _what(self) -> str:
        return f"the save of step {self._saving}"

    def _written(self) -> None:
        self._writing = None

    def _failed(self, step: int, error: BaseException) -> CheckpointSaveError:
        # The next save opens the directory again, which removes the remains of this save.
        self._manager = None
        self._remains.append(under_way(self.directory / str(step)))
        self._written()
        return save_failed(self.directory / str(step), error)

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            do_in_process_0(process_group(), "making the checkpoint directory", self._make_directory, OSError)
            check_shared(self.directory)
            every = 1 if self._every is None else self._every
            keep = policies.LatestN(self._keep) if self._keep is None or isinstance(self._keep, int) else self._keep
            if self.ranking is not None:
                keep = policies.AnyPreservationPolicy([keep, self.ranking.policy()])
            with shared_work(f"the opening of {self.directory}", lambda error: error):
                self._manager = _Manager(
                    self.directory,
                    options=ocp.CheckpointManagerOptions(
                        save_decision_policy=policies.FixedIntervalPolicy(every) if isinstance(every, int) else every,
                        preservation_policy=keep,
                        best_fn=lambda _: 0.0,  # so that Orbax writes metrics; the policy alone decides what is kept
                        create=False,
                        # Synchronous saves also write in the background and wait: so both kinds fail in the same way.
                        enable_async_checkpointing=True,
                        async_options=ocp.options.AsyncOptions(
                            barrier_sync_fn=background_barrier(
                                self._what, lambda error: save_failed(self.directory / str(self._saving), error)
                            ),
                        ),
                        multiprocessing_options=multiprocessing_options("jaxpp_flax"),
                    ),
                    handler_registry=step_registry(),
                )
        return self._manager

    def _make_directory(self) -> None:
        """Make the directory, and remove what is left of saves that were cut off before the run, or failed in it.

        A save of another job that is under way is not among them, unless it began before this run and is not over yet.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self._remains:
            if path.exists() and not (path.name.isdigit() and is_complete(path)):
                epath.Path(path).rmtree(missing_ok=True)
        self._remains = []
