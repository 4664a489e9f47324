"""A loop of the user's own over `training_steps`, with hooks; and the state after a `fit` that trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from jaxpp_flax import DictTracker, PipelineTrainer
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.trainers import Checkpoints, Evaluate, Logging, LogMetrics, LoopHook, StepRecord, callbacks
from jaxpp_flax.trainers.state.holder import OnDisk
from tests.helpers import tree_allclose
from tests.trainers import models as m

DATA = [m.make_batch(4, seed) for seed in range(3)]


def make_trainer(directory: Path, tracker: DictTracker | None = None) -> PipelineTrainer:
    return PipelineTrainer(
        m.LinenModel(2),
        optax.adam(0.1),
        m.mean_loss,
        num_stages=1,
        num_microbatches=2,
        variables=m.LinenModel(2).init(jax.random.key(0), DATA[0]["tokens"]),
        logging=Logging(tracker=tracker, every=2, progress=False),
        checkpoints=Checkpoints(directory, every=2),
    )


def records_of(tracker: DictTracker) -> dict[str, Any]:
    """Without the rates, which are times."""
    return {name: rows for name, rows in tracker.metrics.items() if not name.endswith("_per_second")}


def test_a_loop_with_hooks_logs_evaluates_and_saves_as_fit_does(tmp_path: Path):
    fitted, looped = DictTracker(), DictTracker()
    fit, loop = make_trainer(tmp_path / "fit", fitted), make_trainer(tmp_path / "loop", looped)
    fit.fit(DATA, steps=5, eval_data=DATA[:1], eval_every=2)
    log = LogMetrics(loop)
    steps = loop.training_steps(DATA, steps=5, hooks=[log, Evaluate(loop, DATA[:1], every=2, log=log)])
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert {name: list(rows) for name, rows in records_of(fitted).items()} == {
        "loss": [1, 2, 4, 5],  # the first one, each second one, and the last one
        "eval_loss": [2, 4, 5],
    }
    assert records_of(looped) == records_of(fitted)
    assert "tokens_per_second" in looped.metrics
    for step in ("2", "4", "5"):
        saved = [make_trainer(tmp_path / name) for name in ("fit", "loop")]
        for trainer, name in zip(saved, ("fit", "loop"), strict=True):
            trainer.restore(tmp_path / name / step)
        tree_allclose(saved[1].state, saved[0].state, rtol=0, atol=0)
        for item in ("data", "about"):
            expected = read_json(tmp_path / "fit" / step, item)
            assert expected
            assert read_json(tmp_path / "loop" / step, item) == expected


class Events(LoopHook):
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def __call__(self, record: StepRecord) -> None:
        self.events.append((record.step, float(record.metrics["loss"]), record.batch is DATA[record.step - 1]))

    def end(self) -> None:
        self.events.append("end")


def test_hooks_run_before_the_body_and_end_with_the_data(tmp_path: Path):
    trainer, events = make_trainer(tmp_path), list[Any]()
    hooks = [Events(events), lambda record: events.append(f"function {record.step}")]
    for step, metrics in trainer.training_steps(DATA[:2], hooks=hooks):
        assert events[-2:] == [(step, float(metrics["loss"]), True), f"function {step}"]
    assert events[-1] == "end"
    for _ in trainer.training_steps(DATA, hooks=[Events(events := [])]):
        break
    assert "end" not in events


def test_a_callback_is_no_hook(tmp_path: Path):
    wrong: Any = callbacks.PrintLoss()
    steps = make_trainer(tmp_path).training_steps(DATA, hooks=[wrong])
    with pytest.raises(TypeError, match=r"hooks holds a PrintLoss; .*LogMetrics\(trainer, callbacks=\[...\]\)"):
        next(steps)


@pytest.mark.parametrize("limit", [{"steps": 2}, {"epochs": 1}, {"epochs": 2, "resume_data": "refuse"}])
def test_the_state_after_fit_is_in_memory(limit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where there was nothing to do, or an error before the first step: a property never reads the disk."""
    trained = make_trainer(tmp_path)
    trained.fit(DATA[:2])
    resumed, data = make_trainer(tmp_path), DATA[:2]
    if "resume_data" in limit:
        with pytest.raises(ValueError, match="resume_data"):
            resumed.fit(data, resume=True, **{**limit, "resume_data": "unknown"})
    else:
        assert resumed.fit(data, resume=True, **limit) == {}
    monkeypatch.setattr(OnDisk, "read", None)
    tree_allclose(resumed.state, trained.state, rtol=0, atol=0)


def test_the_state_of_a_resumed_run_is_not_read_before_its_first_batch(tmp_path: Path):
    make_trainer(tmp_path).fit(DATA[:2])
    resumed = make_trainer(tmp_path)

    def data() -> Any:
        yield from DATA[:2]
        assert resumed.evaluate(DATA[:1])["loss"] > 0  # a call may read it
        assert int(resumed.state.step) == 2
        yield DATA[2]

    class Looks:
        def __iter__(self) -> Any:
            with pytest.raises(RuntimeError, match=r"the state is the checkpoint .*/2, which `fit\(resume=True\)`"):
                _ = resumed.state
            return data()

    resumed.fit(Looks(), steps=3, resume=True)
    assert resumed.step == int(resumed.state.step) == 3
