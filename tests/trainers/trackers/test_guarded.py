"""A tracker that fails ends no training; its state goes to a tracker of its kind, or is left out with a line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
import pytest

from jaxpp_flax import DictTracker, JsonlTracker, PipelineTrainer
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.trainers import (
    Callback,
    Checkpoints,
    CompositeTracker,
    Logging,
    LogMetrics,
    MlflowTracker,
    Tracker,
    WandbTracker,
)
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps
from tests.trainers.trackers.services import install_mlflow, install_wandb

DATA = [m.make_batch(4, seed) for seed in range(3)]


@sharing_steps("tracker", "checkpoints", "progress")
def make_trainer(tracker: Tracker | None, *, progress: bool = False, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        m.Layers(), optax.sgd(0.1), lambda model, batch: (model(batch["tokens"][:, :4] * 1.0) ** 2).mean(),
        num_stages=1, num_microbatches=2, logging=Logging(tracker=tracker, every=1, progress=progress), **options,
    )  # fmt: skip


class Fails(Tracker):
    """Raises at some of its calls of `log`, and keeps the steps of the others."""

    def __init__(self, error: BaseException, at: Callable[[int], bool] = lambda call: True, **hooks: BaseException):
        self.error, self.at, self.hooks = error, at, hooks
        self.calls, self.steps = 0, list[int]()

    def log(self, metrics: Any, *, step: int) -> None:
        self.calls += 1
        if self.at(self.calls):
            raise self.error
        self.steps.append(step)

    def _hook(self, name: str) -> None:
        if name in self.hooks:
            raise self.hooks[name]

    def close(self, error: BaseException | None = None) -> None:
        self._hook("close")

    def get_state(self) -> Any:
        self._hook("get_state")
        return "state"

    def set_state(self, state: Any) -> None:
        self._hook("set_state")


def texts_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {warning.category for warning in caught} <= {RuntimeWarning}
    return [str(warning.message) for warning in caught]


def test_one_row_that_fails_is_told_and_the_run_goes_on(tmp_path: Path):
    tracker = Fails(OSError("503 Service Unavailable"), at=lambda call: call == 3)
    trainer = make_trainer(tracker, checkpoints=Checkpoints(tmp_path, every=2))
    (text,) = texts_of(lambda: trainer.fit(DATA, steps=6))
    assert text.startswith("Fails.log failed at step 3: OSError('503 Service Unavailable'). Training goes on")
    assert tracker.steps == [1, 2, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6"]


def test_a_tracker_that_fails_for_ever_is_told_once_and_counted():
    trainer = make_trainer(Fails(OSError("away")))
    first, count = texts_of(lambda: trainer.fit(DATA, steps=5))
    assert "Fails.log failed at step 1" in first
    assert count == "Fails.log failed 5 times by OSError, at steps 1 to 5: it lacks these rows."
    assert len(texts_of(lambda: trainer.fit(DATA, steps=2))) == 2, "each fit tells of its own"


def test_other_trackers_get_the_row():
    kept, failing = DictTracker(), Fails(ValueError("no number"))
    trainer = make_trainer(CompositeTracker(failing, CompositeTracker(kept)))
    assert texts_of(lambda: trainer.fit(DATA))[0].startswith("Fails.log failed at step 1: ValueError")
    assert list(kept["loss"]) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["evaluation", "own loop", "error at the end"])
def test_wherever_a_row_comes_from(kind: str):
    trainer = make_trainer(Fails(OSError("away"), at=lambda call: call in (2, 4)))

    def call() -> None:
        if kind == "evaluation":
            trainer.fit(DATA, eval_data=DATA[:1], eval_every=1)
        elif kind == "own loop":
            list(trainer.training_steps([*DATA, *DATA], callbacks=[LogMetrics()]))
        else:
            with pytest.raises(ZeroDivisionError) as raised:
                trainer.fit(DATA[0] if i < 2 else 1 / 0 for i in range(3))
            assert not any("are lost" in note for note in raised.value.__notes__)

    assert texts_of(call)[0].startswith("Fails.log failed at step ")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_ctrl_c_and_an_exit_are_no_failures_of_a_tracker(error: BaseException):
    with pytest.raises(type(error)):
        make_trainer(Fails(error)).fit(DATA)


def test_a_callback_of_the_user_that_fails_ends_the_run():
    class Own(Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            trainer.tracker.log({}, step=record.step)

    with pytest.raises(OSError, match="away"):
        make_trainer(Fails(OSError("away"))).fit(DATA, callbacks=[Own()])


def test_a_state_that_cannot_be_had_loses_no_save(tmp_path: Path):
    tracker = Fails(OSError(), at=lambda _: False, get_state=OSError("away"), close=OSError("away too"))
    trainer = make_trainer(tracker, checkpoints=Checkpoints(tmp_path, every=1))
    state, close = texts_of(lambda: trainer.fit(DATA))
    assert state.startswith("Fails.get_state failed: OSError('away')")
    assert close == "Fails did not close, so its last metrics may be missing: OSError('away too')"
    assert (tmp_path / "3").is_dir()


class Another(Fails):
    pass


TRACKERS: dict[str, Callable[[Path], Tracker | None]] = {
    "none": lambda _: None,
    "memory": lambda _: DictTracker(),
    "file": lambda path: JsonlTracker(path / "log.jsonl"),
    "wandb": lambda _: WandbTracker(project="test"),
    "mlflow": lambda _: MlflowTracker(),
    "both": lambda path: CompositeTracker(JsonlTracker(path / "log.jsonl"), WandbTracker(project="test")),
    "one": lambda path: CompositeTracker(MlflowTracker()),
    "own": lambda _: Fails(OSError(), at=lambda _: False),
    "own that refuses": lambda _: Fails(OSError(), at=lambda _: False, set_state=KeyError("run")),
}
KEEPS = {"wandb": "WandbTracker", "both": "WandbTracker", "mlflow": "MlflowTracker", "one": "MlflowTracker"}
OWN = {"own": "Fails", "own that refuses": "Fails"}


@pytest.mark.parametrize("second", TRACKERS)
@pytest.mark.parametrize("first", [name for name in TRACKERS if name not in ("one", "own that refuses")])
def test_a_run_resumes_under_any_tracker(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wandb, mlflow = install_wandb(monkeypatch), install_mlflow(monkeypatch)
    run, options = tmp_path / "run", {"progress": True}
    make_trainer(TRACKERS[first](tmp_path), checkpoints=Checkpoints(run, every=1), **options).fit(DATA, steps=1)
    trainer = make_trainer(TRACKERS[second](tmp_path), checkpoints=Checkpoints(run, every=1), **options)
    trainer.fit(DATA, steps=2, resume=True)
    assert trainer.step == 2
    kinds = {**KEEPS, **OWN}
    lines = [line for line in capsys.readouterr().out.splitlines() if "the checkpoint's state of" in line]
    is_taken = kinds.get(first) == kinds.get(second) and second != "own that refuses"
    assert bool(lines) == (first in kinds and not is_taken)
    if lines:
        assert kinds[first] in lines[0]
        saved = read_json(run / "2", "callbacks")
        assert kinds[first] in [state["tracker"] for state in saved["LogMetrics"]], "for a later run"
    if first in KEEPS and is_taken:
        assert len(wandb.runs) + len(mlflow.client.runs) == 1, "the run of the service goes on"


@pytest.mark.parametrize(
    ("state", "taken"), [({"id": "a"}, True), ([None, {"id": "a"}], True), ({"run_id": "a"}, False), ("text", False)]
)
def test_the_states_of_older_checkpoints(state: Any, taken: bool, monkeypatch: pytest.MonkeyPatch):
    install_wandb(monkeypatch)
    tracker, told = WandbTracker(), list[str]()
    whole = CompositeTracker(DictTracker(), tracker) if isinstance(state, list) else tracker
    make_trainer(whole).guarded_tracker.set_state(state, told.append)
    assert (tracker.get_state() == {"id": "a"}) == taken
    assert bool(told) != taken


def test_a_state_without_a_tracker_is_kept_for_a_later_run():
    told, state = list[str](), {"tracker": "WandbTracker", "state": {"id": "a"}}
    tracker = make_trainer(DictTracker()).guarded_tracker
    tracker.set_state([state], told.append)
    reason = "this run has no such tracker; later checkpoints keep it"
    assert told == [f"the checkpoint's state of WandbTracker is left out: {reason}"]
    assert tracker.get_state() == [state]
