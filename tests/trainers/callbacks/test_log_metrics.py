"""Rows; and the life of a tracker: configured once, closed on every way out, continued by a resumed run."""

from __future__ import annotations

import dataclasses
import gc
import signal
import weakref
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import Callback, PipelineTrainer, Tracker
from jaxpp_flax.trainers import Checkpoints, Logging, NonFiniteLossError
from jaxpp_flax.trainers.callbacks import has_failed
from jaxpp_flax.trainers.callbacks.base import StepRecord
from jaxpp_flax.trainers.callbacks.log_metrics import LogMetrics
from jaxpp_flax.trainers.callbacks.sigterm import PREEMPTED_STATUS
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics
from jaxpp_flax.trainers.trackers import CompositeTracker, DictTracker
from tests.trainers.sharing import sharing_steps

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

    def close(self, error=None):
        self.calls.append("close")
        if self.fails:
            raise OSError("no space left")

    def get_state(self):
        return self.run

    def set_state(self, state):
        self.run = state


@sharing_steps("tracker", "config", "checkpoints")
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
        def on_step(self, trainer, record):
            if record.step == 2:
                raise error("stop")

    tracker = Recorder(fails=True)
    with pytest.warns(RuntimeWarning, match="Recorder did not close.*no space left"), pytest.raises(error):
        trainer_with(tracker).fit(DATA, callbacks=[Failing()])
    assert tracker.calls[-1] == "close", "and its own error does not hide the first one"


@pytest.mark.parametrize("hook", ["on_fit_start", "on_fit_end"])
def test_the_tracker_is_closed_after_an_error_of_a_callback(hook):
    def fail(trainer, error=None):
        trainer.tracker.log({"note": 1.0}, step=0)
        raise ValueError(hook)

    callback, tracker = Callback(), Recorder()
    setattr(callback, hook, fail)
    with pytest.raises(ValueError, match=hook):
        trainer_with(tracker).fit(DATA, callbacks=[callback])
    assert (tracker.calls[0], tracker.calls[-2:]) == ("config", ["log 0", "close"])


def test_a_tracker_gets_steps_in_ascending_order():
    """W&B drops a row whose step is lower than that of a row before."""

    class Samples(Callback):
        def on_step(self, trainer, record):
            trainer.tracker.log({"sample": 1.0}, step=record.step)

    trainer_with(tracker := Recorder()).fit(DATA, callbacks=[Samples()], eval_data=DATA[:1], eval_every=2)
    steps = [int(call.removeprefix("log ")) for call in tracker.calls if call.startswith("log ")]
    assert steps == [1, 1, 2, 2, 2, 3, 3, 3]


class Fails(Callback):
    def __init__(self, **hooks: BaseException) -> None:
        super().__init__()
        self.hooks = hooks

    def on_step(self, trainer, record):
        if record.step == 2 and "on_step" in self.hooks:
            raise self.hooks["on_step"]

    def on_fit_end(self, trainer, error):
        if "on_fit_end" in self.hooks:
            raise self.hooks["on_fit_end"]


class Ended(Recorder):
    """Notes whether the run has failed when it is closed."""

    def close(self, error=None):
        self.calls.append(f"failed: {has_failed(error)}")


def test_an_error_of_on_fit_end_does_not_replace_the_first_error():
    tracker = Ended()
    callbacks = [Fails(on_fit_end=OSError("second")), Fails(on_fit_end=OSError("first"), on_step=ValueError("cause"))]
    with pytest.raises(ValueError, match="cause") as raised:
        trainer_with(tracker).fit(DATA, callbacks=callbacks)
    notes = [note for note in raised.value.__notes__ if "on_fit_end" in note]
    assert notes == [f"Fails.on_fit_end failed as well: OSError('{name}')" for name in ("first", "second")]
    assert tracker.calls[-1] == "failed: True"


def test_the_first_error_of_on_fit_end_is_raised_and_the_run_has_failed():
    tracker = Ended()
    with pytest.raises(OSError, match="first") as raised:
        trainer_with(tracker).fit(DATA, callbacks=[Fails(on_fit_end=OSError(of)) for of in ("second", "first")])
    assert "Fails.on_fit_end failed as well: OSError('second')" in raised.value.__notes__
    assert tracker.calls[-1] == "failed: True"


def test_ctrl_c_in_on_fit_end_keeps_the_first_error_as_its_context():
    cause = ValueError("cause")
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer_with(tracker := Ended()).fit(DATA, callbacks=[Fails(on_fit_end=KeyboardInterrupt(), on_step=cause)])
    assert raised.value.__context__ is cause
    assert tracker.calls[-1] == "failed: True"


def test_a_run_whose_last_loss_is_not_finite_has_failed():
    with pytest.raises(NonFiniteLossError, match="the loss of step 3 is nan"):
        trainer_with(tracker := Ended()).fit([*DATA[:2], DATA[2] * jnp.nan])
    assert tracker.calls[-1] == "failed: True"


def test_a_run_that_sigterm_ends_has_not_failed(tmp_path):
    class Asked(Callback):
        def on_step(self, trainer, record):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        trainer_with(tracker := Ended(), checkpoints=Checkpoints(tmp_path)).fit(DATA, callbacks=[Asked()])
    assert tracker.calls[-1] == "failed: False"


@pytest.mark.parametrize(("status", "failed"), [(None, False), (0, False), (1, True), ("no data", True)])
def test_an_exit_without_an_error_is_no_failure(status, failed):
    with pytest.raises(SystemExit):
        trainer_with(tracker := Ended()).fit(DATA, callbacks=[Fails(on_step=SystemExit(status))])
    assert tracker.calls[-1] == f"failed: {failed}"


@pytest.mark.parametrize("every", [None, 3])
def test_sigterm_while_the_tracker_is_closed_saves_and_exits(every, tmp_path):
    class Asked(Recorder):
        def close(self, error=None):
            super().close()
            assert signal.getsignal(signal.SIGTERM) is not before, "a close that hangs has a deadline"
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_with(tracker := Asked(), checkpoints=Checkpoints(tmp_path, every=every))
    with pytest.raises(SystemExit) as raised:
        trainer.fit(DATA)
    assert (raised.value.code, tracker.calls[-1]) == (PREEMPTED_STATUS, "close")
    assert (tmp_path / "3").is_dir()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_in_the_handler_of_an_older_error_has_not_failed():
    try:
        raise KeyError
    except KeyError:
        trainer_with(tracker := Ended()).fit(DATA)
    assert tracker.calls[-1] == "failed: False"


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


def test_the_rate_counts_the_time_of_training_alone():
    now, tracker, batch = [0.0], DictTracker(), jnp.zeros((4, 2))
    trainer = trainer_with(tracker)
    trainer.log_every = 1
    trainer.measures = RunMetrics(clock=Clock(lambda: now[0]))
    log = LogMetrics()
    log.on_fit_start(trainer)
    for step in range(1, 6):
        now[0] += 2
        with trainer.measures.clock.part("save"):
            now[0] += 10
        log.on_step(trainer, StepRecord(step, {"loss": step / 10}, batch))
    assert tracker["examples_per_second"] == {2: 2.0, 3: 2.0, 4: 2.0}


def test_a_deleted_trainer_is_gone_after_fit():
    """Its state takes most of a device: no circle of references keeps it until a collection."""

    def fitted() -> list[weakref.ref[Any]]:
        trainer = trainer_with(DictTracker())
        trainer.fit(DATA, eval_data=DATA)
        return [weakref.ref(trainer), weakref.ref(trainer.held)]

    gc.disable()
    try:
        assert [kept() for kept in fitted()] == [None, None]
    finally:
        gc.enable()


def test_a_tracker_that_cannot_begin_is_closed():
    class NoConfig(Recorder):
        def log_config(self, config):
            raise OSError("no server")

    with pytest.raises(OSError, match="no server"):
        trainer_with(tracker := NoConfig()).fit(DATA)
    assert tracker.calls == ["close"]
