"""The trainer's checkpoints: the contents of a step's directory, and the code that resumes a run from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpp_flax.checkpoint import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnfinishedCheckpointError,
)
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.format.integrity import describe_checkpoint
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten, nest
from jaxpp_flax.checkpoint.reading import RestorePlan, plan_restore, read_json, read_whole_metadata, stored_leaves
from jaxpp_flax.checkpoint.writing import save_step
from jaxpp_flax.counts import is_whole
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.messages import listed, near_names
from jaxpp_flax.processes.comparison import compare_lines, exchange_values, found_by_process_0
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.waits import print_notice
from jaxpp_flax.trainers.callbacks.base import CallbackStates
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.position import DataPosition, gather_positions, own_position
from jaxpp_flax.trainers.data.stream import TrainingData
from jaxpp_flax.trainers.metrics.clock import Clock, timed
from jaxpp_flax.trainers.metrics.measured_step import MeasuredStep
from jaxpp_flax.trainers.model.chosen_model import ChosenModel
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.state.frozen_leaves import OtherFrozen, disk_names, left_out
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.sources import Checkpoint
from jaxpp_flax.trainers.state.train_state import WIDENED, TrainState
from jaxpp_flax.trainers.step.nonfinite import StepsUnderWay, check_parameters

__all__ = ["Checkpointing", "Resume", "check_resume"]

Resume = bool | int | Literal["latest_valid"]

_DAMAGE = (CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError)
# The JSON of a step that is read when a run goes on from it.
_JSON = ("about", "callbacks", "data", "metrics")


def check_resume(value: Any) -> None:
    """Refuse a value that `fit(resume=)` does not know."""
    if not isinstance(value, bool) and value != "latest_valid" and not (is_whole(value) and value > 0):
        raise ValueError(f'resume={value!r}: it must be True, False, "latest_valid" or the step of a checkpoint.')


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Saves and restores. A step's directory holds these items of Orbax:

    - `state`: the `TrainState` (parameters, optimizer, other variables, keys of random numbers, step), by logical path;
    - `data`: the position of the run in its data;
    - `callbacks`: the states of the callbacks of `fit`, such as the patience of `EarlyStopping`;
    - `metrics`: those of the step and of its evaluation;
    - `about`: the name of the model, and that of the run.

    Args:
      measured: the metrics of the latest step, which a checkpoint keeps for Orbax's policies.
      saves_nonfinite: True if parameters that are not finite may be saved.
    """

    store: CheckpointStore | None
    held: StateHolder
    model: ChosenModel
    data: TrainingData
    callbacks: CallbackStates
    measured: MeasuredStep
    under_way: StepsUnderWay
    trained_on: BatchComparison
    display: Display
    saves_nonfinite: bool
    clock: Clock

    @without_ambient_mesh
    @timed("save")
    def save(self, step: int | None = None, *, wait: bool = True) -> Path:
        """Write the state in memory to the trainer's directory; `step` is its step, or None."""
        beside = self._beside()
        store = self.need_store("save")
        if step is not None and step != self.held.step:
            raise ValueError(
                f"save({step}): the state in memory is that of step {self.held.step}, and no other can be saved. Call "
                "save()."
            )
        if store.is_noted(self.held.memory) and self.is_saved():
            self.display.message(f"step {self.held.step} is saved already: fit has saved its last step")
            return store.directory / str(self.held.step)
        if not self.saves_nonfinite:  # a bad checkpoint would replace a good one
            self.under_way.finish()
            check_parameters(self.held.step, self.held.whole().params)
        metrics = self.measured.at(self.held.step)
        self.leave_branch()
        store.save(self.held.step, self._on_disk(self.held.whole()), beside, metrics=metrics, wait=wait)
        self.measured.saved(self.held.step)
        return store.directory / str(self.held.step)

    @without_ambient_mesh
    @timed("save")
    def save_whole(self, where: str | os.PathLike[str]) -> Path:
        """Write the state in memory to another path."""
        return save_step(where, self._on_disk(self.held.whole()), self._beside())

    def _begin_save(self) -> None:
        self.held.meet("trainer.save")
        self.trained_on.check(self.held.step)

    def _beside(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the state, once all processes come here."""
        self._begin_save()
        with process_group().waiting(f"the save of step {self.held.step}"):
            data = gather_positions(None if (at := self.data.position) is None else at.to_json())
        about = {"model": self.model.name, "run": process_group().run_id}
        beside: dict[str, Any] = {"data": data, "about": about}
        return beside | ({"callbacks": states} if (states := self.callbacks.to_json()) else {})

    @without_ambient_mesh
    @timed("save")
    def save_part(self, where: str | os.PathLike[str] | int | None, only: PathFilter) -> Path:
        """Write the chosen leaves. The optimizer's first state is made only if a leaf of it is chosen."""
        self._begin_save()
        if where is None or isinstance(where, int):
            raise ValueError(
                f"save({where}, only={only!r}): the trainer's directory holds only complete states, from which fit "
                "resumes. Pass another path for a part of the state."
            )
        wanted = choose(only)
        names = list(filter(wanted, flatten(self.held.weights())[0]))
        if not names:
            raise ValueError(
                f"save({where!s}, only={only!r}): no leaf of trainer.state has such a path. Try 'params/*'."
            )
        is_of_model = all(name.startswith(("params/", "model_state/")) for name in names)
        tree = self._on_disk(self.held.weights() if is_of_model else self.held.whole(), names)
        return save_step(where, tree, {"about": {"model": self.model.name}})

    def _on_disk(self, state: TrainState, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return a state, or its leaves of these names, as the tree that a checkpoint has."""
        leaves, places = flatten(state)[0], disk_names(state, self.model.adapter.frozen_in(state.model_state))
        return nest({places[name]: leaves[name] for name in (leaves if names is None else names)})

    def path_of(self, where: str | os.PathLike[str] | int) -> Any:
        """Return the path of a checkpoint: of a step, the latest or the best in the trainer's directory, or a path."""
        if not isinstance(where, int) and where not in ("latest", "best"):
            return where
        store = self.need_store("restore")
        store.wait()  # the checkpoint to restore may still be written
        return store.path(where if isinstance(where, int) else _latest(store) if where == "latest" else _best(store))

    def restore(
        self,
        path: Any,
        *,
        only: PathFilter | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Literal["error", "keep"] = "error",
    ) -> None:
        """Make a checkpoint, or some of its leaves, the state."""
        if self.held.is_across:
            lines = [describe_checkpoint(path), f"rename={rename}", f"missing={missing}"]
            lines.append(f"only={_filter_in_words(only)}")
            compare_lines(process_group(), "what to restore", lines, None)
        metadata = read_whole_metadata(path, _JSON)
        stored = stored_leaves(metadata).keys()
        others = OtherFrozen.of(flatten(self.held.memory)[0].keys(), stored)
        plan = self._plan(path, metadata, only, rename, missing, others)
        fresh = list(filter(choose(only), others.fresh)) if missing == "error" else []
        following = list[str]()
        if only is not None or missing == "keep":
            restored = {path.removeprefix("params/") for path in plan.chosen if path.startswith("params/")}
            following = [path for path in self.held.made_of(restored) if path not in plan.chosen]
            self.held.check_kept({*plan.chosen, *following})
        if following:
            self.display.message(f"what is made from parameters follows the restored ones: {listed(following, 3, str)}")
        self._tell_of_frozen(only, plan.chosen, stored)
        position = own_position(read_json(path, "data"))
        own = plan.at({"step": None} if "step" in plan.chosen else {})
        step = int(own.read_leaves()["step"]) if own.chosen else self.held.step
        self.under_way.clear()
        self.held.take(Checkpoint(plan))
        self.held.forget(following)
        self._begin_fresh(fresh, list(filter(choose(only), others.unread)))
        self.take_position(step, None if only is not None else position)

    def _tell_of_frozen(self, only: PathFilter | None, chosen: Collection[str], stored: Collection[str]) -> None:
        """Tell of frozen parameters that `only` leaves out: a reader takes `params/*` for all weights."""
        frozen = self.model.adapter.frozen_in(self.held.memory.model_state)
        if kept := left_out(frozen, chosen, stored):
            self.display.message(
                f"only={_filter_in_words(only)} leaves out {len(kept)} frozen parameters, which keep their values "
                f"though the checkpoint has others: {listed(kept, 3, str)}. To restore them too: "
                "only=['params/*', 'model_state/*']"
            )

    def _begin_fresh(self, fresh: Sequence[str], unread: Sequence[str]) -> None:
        """Make what the optimizer keeps of parameters that were frozen in the run of the checkpoint; tell of both."""
        if unread:
            self.display.message(
                "some parameters are frozen that were trained in the run of the checkpoint. What the optimizer kept of "
                f"them is not restored: {listed(unread, 3, str)}"
            )
        if fresh:
            self.held.forget(fresh)
            self.display.message(
                "some parameters are trained that were frozen in the run of the checkpoint. What the optimizer keeps "
                f"of them begins anew: {listed(fresh, 3, str)}"
            )

    def _plan(
        self,
        path: Path,
        metadata: Any,
        only: PathFilter | None,
        rename: Mapping[str, str] | None,
        missing: Literal["error", "keep"],
        others: OtherFrozen,
    ) -> RestorePlan:
        """Compare a checkpoint with the state."""
        about = read_json(path, "about") or {}
        try:
            # A checkpoint that no trainer wrote may hold other items.
            extra = "ignore" if rename else "error"
            return plan_restore(
                path, metadata, self.held.target(), only=only, rename=rename, missing=missing, extra=extra,
                widen=WIDENED, may_differ=others.paths, may_stay=self.held.can_stay(),
            )  # fmt: skip
        except CheckpointMismatchError as error:
            if about.get("model", self.model.name) == self.model.name:
                raise
            raise CheckpointMismatchError(
                f"{error.message} It was written for the model {about['model']}; this trainer has {self.model.name}.",
                error.faults,
            ) from None

    def take_position(self, step: int, position: DataPosition | None) -> None:
        """Note that the state in memory is another one, of this step and this position in the data."""
        before, self.held.step = self.held.step, step
        self.measured.clear()
        self.data.restored(position, back=before - step)
        self.under_way.clear()
        if self.store is not None:
            self.store.branch = step if self.data.is_running else None

    def leave_branch(self) -> None:
        """If a loop has gone back by a restore, rename the later checkpoints: they belong to steps that it has left."""
        if self.store is None or (begin := self.store.branch) is None:
            return
        self.store.branch = None
        self.store.wait()  # a later checkpoint may still be written
        self.store.refuse_another_writer()
        steps = [step for step in self.store.steps() if step > begin]
        for step in exchange_values(process_group(), "the checkpoints after a restore", steps)[0]:
            left = self.store.set_aside(step, "abandoned")
            self.display.message(f"the run has gone back to step {begin}: its checkpoint of step {step} is now {left}")

    @without_ambient_mesh
    @timed("restore")
    def resume(self, how: Resume) -> DataPosition | None:
        """Restore the latest checkpoint, if one exists, or that of a step; return its position in the data."""
        store = self.need_store("fit(resume=True)")
        store.wait()  # the latest checkpoint may still be written
        if not isinstance(how, (bool, str)) and not self._has_rolled_back(store):
            return self._roll_back(store, int(how))
        before, aside = self.held.step, list[Path]()
        while (latest := _latest(store)) is not None:
            path = store.path(latest)
            try:
                self._take_over(path)
            except _DAMAGE as error:
                if how != "latest_valid":
                    raise type(error)(
                        f'{error} fit(resume="latest_valid") renames {path} and continues from the newest complete '
                        "checkpoint."
                    ) from error
                aside.append(store.set_aside(latest))
                if process_group().process_index == 0:  # also without logging: the run goes back
                    print_notice(f"{error} It is now {aside[-1]}.")
            else:
                break
        if latest is None:
            self.callbacks.restored(None)
            if aside:
                names = ", ".join(path.name for path in aside)
                raise CheckpointNotFoundError(
                    f"{store.directory} holds no complete checkpoint: the damaged ones are {names}. Start again in "
                    "another directory, or restore a checkpoint from another place."
                )
            return self.data.position
        later = f"; later steps, up to step {before}, were not saved and are lost"
        self.display.message(f"resumed from {path}, step {latest}{later if before > latest else ''}")
        return self.restored_position()

    def _has_rolled_back(self, store: CheckpointStore) -> bool:
        """Return whether the launcher has started the run again, and it has saved since it went back to a step."""
        group, latest = process_group(), _latest(store)
        if group.attempt == 1 or self.held.step or latest is None:
            return False

        def is_own() -> bool:
            return (read_json(store.path(latest), "about") or {}).get("run") == group.run_id

        return found_by_process_0(group, "whether the run has gone back to a step", is_own, *_DAMAGE, OSError)

    def _roll_back(self, store: CheckpointStore, step: int) -> DataPosition | None:
        """Restore the checkpoint of a step, which need not be the latest one; return its position in the data."""
        path = store.path(step)
        self._take_over(path)
        latest = _latest(store) or step
        later = f"; later checkpoints, up to step {latest}, are renamed to <step>.abandoned after the next step"
        self.display.message(f"resumed from {path}, step {step}{later if latest > step else ''}")
        store.branch = step
        return self.restored_position()

    def restored_position(self) -> DataPosition | None:
        """Return the position in the data after a restore; tell the user if there is none."""
        position = self.data.position
        if position is None:
            self.display.message("the checkpoint holds no position in the data: the data starts from its beginning")
        return position

    def _take_over(self, path: Path) -> None:
        """Make a step's checkpoint the state."""
        self.held.meet("trainer.restore")
        self.restore(path)
        self.callbacks.restored(read_json(path, "callbacks") or {})

    def is_saved(self) -> bool:
        """True if process 0 sees a save of the step in memory: another process may not see the last save yet."""
        return exchange_values(
            process_group(), "whether the last step is saved", self.need_store("fit").holds(self.held.step)
        )[0]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step in memory, from its checkpoint as process 0 sees it; {} without them."""
        store = self.need_store("fit(resume=True)")
        found = read_json(store.directory / str(self.held.step), "metrics") or self.measured.at(self.held.step) or {}
        return dict(exchange_values(process_group(), "the metrics of the last step", dict(found))[0])

    def need_store(self, what: str) -> CheckpointStore:
        """Return the trainer's directory of checkpoints; refuse the call `what` without one."""
        if self.store is None:
            raise CheckpointNotFoundError(
                f"{what} needs a directory of checkpoints: give the trainer checkpoints=, or pass a path."
            )
        return self.store


def _filter_in_words(only: PathFilter | None) -> str:
    return "a function" if callable(only) else repr(only)


def _latest(store: CheckpointStore) -> int | None:
    """Return the latest step that process 0 sees: on a shared disk another process may not see this step yet."""
    return exchange_values(process_group(), "the latest step", store.latest())[0]


def _best(store: CheckpointStore) -> int:
    """Return the best step that process 0 sees."""
    best = exchange_values(process_group(), "the best step", store.best())[0]
    if best is None:
        name = None if store.ranking is None else store.ranking.best
        names = store.metric_names()
        raise CheckpointNotFoundError(
            f"{store.directory} holds no checkpoint with a number for {name!r}, the metric of Checkpoints(best=). Its "
            f"checkpoints have: {', '.join(names) or 'no metrics'}.{near_names(str(name), names)} A checkpoint has "
            "metrics of its own step: evaluate at the steps of saves (eval_every=), or restore another one, such as "
            '"latest".'
        )
    return best
