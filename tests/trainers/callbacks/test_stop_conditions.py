"""Callbacks that end `fit`: a metric, a clock, a file."""

from __future__ import annotations

import itertools
import time

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Checkpoints, Evaluate, Inference, StepRecord
from jaxpp_flax.trainers.callbacks import EarlyStopping, TimeLimit
from jaxpp_flax.trainers.callbacks.base import CallbackStates
from tests.trainers.sharing import sharing_steps

DATA = [jnp.ones((4, 2))] * 3


class Stops:
    """Stands in for the trainer: notes why it was stopped."""

    reason: str | None = None

    def stop(self, reason):
        self.reason = reason


@sharing_steps()
def trainer():
    return PipelineTrainer(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
        num_stages=1, num_microbatches=2, logging=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "values", "stopped_at"),
    [("min", [3, 2, 2.5, 2.5], 4), ("max", [1, 2, 1.5, 3, 3.05, 2], 6), ("max", [1, 2, 3], None)],
)
def test_a_metric_that_does_not_improve_ends_the_run(mode, values, stopped_at):
    callback, stops = EarlyStopping("score", patience=2, min_delta=0.1, mode=mode), Stops()
    found = None
    for step, value in enumerate(values, start=1):
        callback.on_evaluate(stops, step, {"score": value})
        callback = restored(callback, mode)  # the state survives a checkpoint
        if stops.reason is not None and found is None:
            found = step
    assert found == stopped_at


def test_the_metric_of_an_evaluation_has_two_names():
    """`eval_loss` is the name in rows and in `Checkpoints(best=)`."""
    callback, stops = EarlyStopping("eval_loss", patience=1), Stops()
    for step in (1, 2):
        callback.on_evaluate(stops, step, {"loss": 1.0})
    assert stops.reason == "eval_loss has not improved on 1 in 1 evaluations"


def restored(callback, mode):
    other = EarlyStopping("score", patience=2, min_delta=0.1, mode=mode)
    other.set_state(callback.get_state())
    return other


def test_a_mode_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"EarlyStopping\(mode='best'\): it must be 'min' or 'max'"):
        EarlyStopping(mode="best")


def test_the_clock_ends_the_run(monkeypatch):
    clock = itertools.count(100.0, 2.0)  # each look at the clock is two seconds later
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    t = trainer()
    callback, stops = TimeLimit(5), Stops()
    callback.on_fit_start(stops)
    for step in (1, 2):
        callback.on_step(stops, StepRecord(step, {}, None))
    assert stops.reason is None
    callback.on_step(stops, StepRecord(3, {}, None))
    assert stops.reason == "the time limit of 5 seconds"
    monkeypatch.undo()
    t.fit(DATA, steps=50, callbacks=[TimeLimit(1e-9)])
    assert (t.step, t.stopping) == (1, "the time limit of 1e-09 seconds")
    with pytest.raises(ValueError, match=r"TimeLimit\(0\): it must be a number of seconds above 0"):
        TimeLimit(0)


@pytest.mark.parametrize("wrong", [{"min_delta": float("nan")}, {"min_delta": -1.0}, {"patience": 2.5}])
def test_numbers_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=f"EarlyStopping.*{next(iter(wrong))}"):
        EarlyStopping(**wrong)


def test_early_stopping_ends_a_loop_of_the_users_own():
    it = trainer()
    stopping = EarlyStopping(patience=1, min_delta=1e9)
    steps = it.training_steps(DATA, steps=8, callbacks=[Evaluate(DATA, every=1), stopping])
    assert [step for step, _ in steps] == [1, 2]
    assert "has not improved" in it.stopping


def test_a_resumed_run_finds_states_by_metric_in_whatever_order(tmp_path):
    """By position, each would go on with the other one's best value, and stop the run too early."""

    def eval_loss_fn(model, x):
        return (model(x) ** 2).mean(), {"score": x.max() * 0.0}

    def states_after(steps, order, folder, **options):
        trainer = PipelineTrainer(
            nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
            num_stages=1, num_microbatches=2, logging=False, checkpoints=Checkpoints(tmp_path / folder, every=9),
            inference=Inference(eval_loss_fn=eval_loss_fn),
        )  # fmt: skip
        watched = [EarlyStopping("eval_loss", patience=9), EarlyStopping("score", patience=9)]
        callbacks = [watched[i] for i in order]
        trainer.fit(DATA * 2, steps=steps, callbacks=callbacks, eval_data=DATA[:1], eval_every=1, **options)
        return [callback.get_state() for callback in watched]

    expected = states_after(5, [0, 1], "whole")
    assert expected[0]["bad"] < expected[1]["bad"]
    states_after(3, [0, 1], "parts")
    assert states_after(5, [1, 0], "parts", resume=True) == expected


def test_states_that_a_checkpoint_could_not_tell_apart_are_refused():
    says = (
        r"two callbacks have a state named 'EarlyStopping\(loss\)', which a checkpoint could not tell apart.*state_name"
    )
    with pytest.raises(ValueError, match=says):
        trainer().fit(iter(()), callbacks=[EarlyStopping(), EarlyStopping(patience=5)], eval_data=DATA, eval_every=1)


def test_states_of_callbacks_that_are_gone_are_left_out_with_a_warning():
    """Names of an older version, which counted callbacks of a class, are among them."""
    states, callback = CallbackStates(), EarlyStopping()
    states.restored({"EarlyStopping": {"best": 1.0, "bad": 2}})
    with pytest.warns(UserWarning, match=r"left out: EarlyStopping\. .* without a state: EarlyStopping\(loss\)\."):
        states.begin([callback], resumed=True)
    assert callback.get_state()["bad"] == 0
