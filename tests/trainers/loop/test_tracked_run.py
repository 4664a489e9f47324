"""The life of a tracker in `fit`: configured once, closed on every way out, continued by a resumed run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import Callback, PipelineTrainer, Tracker
from jaxpp_flax.trainers import Checkpoints, Logging
from jaxpp_flax.trainers.loop.trackers import CompositeTracker, DictTracker

DATA = [jnp.ones((4, 2))] * 3


class Recorder(Tracker):
    """Notes the calls; its state is the name of its run."""

    def __init__(self, run: str = "", *, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.config: dict[str, Any] = {}
        self.run, self.fails = run, fails

    def log(self, metrics, *, step):
        self.calls.append(f"log {step}")

    def log_config(self, config):
        self.calls.append("config")
        self.config = dict(config)

    def close(self):
        self.calls.append("close")
        if self.fails:
            raise OSError("no space left")

    def get_state(self):
        return self.run

    def set_state(self, state):
        self.run = state


def trainer_with(tracker: Tracker, config: Any = None, **options: Any) -> PipelineTrainer:
    logging = Logging(tracker=tracker, config=config, every=2, progress=False)
    return PipelineTrainer(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
        num_stages=1, num_microbatches=2, logging=logging, **options,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    learning_rate: float = 0.1


@pytest.mark.parametrize("config", [{"learning_rate": 0.1}, Settings()])
def test_the_configuration_comes_first_and_close_last(config):
    tracker = Recorder()
    trainer = trainer_with(tracker, config)
    assert tracker.calls == []
    trainer.fit(DATA)
    assert tracker.calls == ["config", "log 1", "log 2", "log 3", "close"]
    assert tracker.config["learning_rate"] == 0.1
    assert (tracker.config["num_stages"], tracker.config["num_microbatches"]) == (1, 2)
    assert tracker.config["versions"]["optax"] == optax.__version__


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_tracker_is_closed_after_an_error(error):
    class Failing(Callback):
        def on_step(self, trainer, step):
            if step == 2:
                raise error("stop")

    tracker = Recorder(fails=True)
    with pytest.warns(RuntimeWarning, match="Recorder did not close.*no space left"), pytest.raises(error):
        trainer_with(tracker).fit(DATA, callbacks=[Failing()])
    assert tracker.calls[-1] == "close", "and its own error does not hide the first one"


@pytest.mark.parametrize("hook", ["on_fit_start", "on_fit_end"])
def test_the_tracker_is_closed_after_an_error_of_a_callback(hook):
    def fail(trainer):
        trainer.tracker.log({"note": 1.0}, step=0)
        raise ValueError(hook)

    callback, tracker = Callback(), Recorder()
    setattr(callback, hook, fail)
    with pytest.raises(ValueError, match=hook):
        trainer_with(tracker).fit(DATA, callbacks=[callback])
    assert (tracker.calls[0], tracker.calls[-2:]) == ("config", ["log 0", "close"])


def test_a_resumed_run_continues_the_tracker_of_the_first(tmp_path):
    first, second, anew = Recorder("first"), Recorder("second"), Recorder("anew")
    trainer_with(CompositeTracker(DictTracker(), first), checkpoints=Checkpoints(tmp_path / "a", every=3)).fit(DATA)
    trainer = trainer_with(CompositeTracker(DictTracker(), second), checkpoints=Checkpoints(tmp_path / "a", every=3))
    trainer.fit(DATA, steps=5, resume=True)
    trainer_with(CompositeTracker(DictTracker(), anew), checkpoints=tmp_path / "b").fit(DATA, resume=True)
    assert (second.run, second.calls) == ("first", ["config", "log 4", "log 5", "close"])
    assert anew.run == "anew"


def test_all_trackers_are_closed_though_one_fails():
    trackers = Recorder(fails=True), Recorder()
    with pytest.raises(ExceptionGroup, match="trackers did not close"):
        CompositeTracker(*trackers).close()
    assert trackers[1].calls == ["close"]


def test_a_configuration_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"Logging\(config=3\): it must be a mapping or a dataclass, not int"):
        Logging(config=3)
