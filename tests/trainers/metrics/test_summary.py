"""The last lines of `fit`, after its end and after an error."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import get_args

import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Callback, Checkpoints, Logging
from jaxpp_flax.trainers.metrics.clock import Part
from jaxpp_flax.trainers.metrics.summary import summarise_run
from jaxpp_flax.trainers.progress import Display
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

BATCHES = [m.make_batch(4, seed) for seed in range(4)]


class Lines(Display):
    def __init__(self):
        super().__init__(messages=False, progress=False)
        self.lines = []

    def message(self, text):
        self.lines.append(text)


class Breaks(Callback):
    def on_step(self, trainer, record):
        if record.step == 3:
            raise RuntimeError("a broken callback")


@sharing_steps("checkpoints")
def make_trainer(checkpoints):
    return PipelineTrainer(
        m.Tokens(1, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=1, num_microbatches=2,
        logging=Logging(progress=False), checkpoints=checkpoints,
    )  # fmt: skip


def make(checkpoints=None):
    trainer, shown = make_trainer(checkpoints), Lines()
    trainer.checkpoints = replace(trainer.checkpoints, display=shown)
    trainer.loop = replace(trainer.loop, display=shown, checkpoints=trainer.checkpoints)
    return trainer, shown


def test_the_end_of_a_run(tmp_path):
    trainer, shown = make(tmp_path)
    metrics = trainer.fit(BATCHES, eval_data=BATCHES[:1])
    first, rate, split, last = shown.lines[-1].splitlines()
    assert re.match(r"4 steps, up to step 4, in 0:00:\d\d$", first)
    assert re.match(r"after compiling: \S+ s a step, [\d,]+ tokens/s; compiling took \S+ s$", rate)
    assert re.match(r"time: .*compiling \d+%", split)
    assert "dispatch" not in split, "on CPU a dispatch runs the computation, so it counts as device time"
    assert last == f"best eval_loss {metrics['eval_loss']:.4f} at step 4; checkpoints in {tmp_path}"
    trainer.fit(BATCHES, steps=2)
    assert shown.lines[-1].startswith("2 steps, up to step 6, in ")
    assert "best loss " in shown.lines[-1]


def test_the_rate_and_the_seconds_of_a_step_leave_compilation_out():
    seconds = {"dispatch": 9.0, "device": 1.0, "data": 10.0, "compilation": 75.0, "save": 5.0}
    lines = summarise_run(7, 5, seconds, (400, "examples"), None, None).splitlines()
    assert lines == [
        "5 steps, up to step 7, in 0:01:40",
        "after compiling: 4 s a step, 20 examples/s; compiling took 75 s",
        "time: compiling 75%, waiting for data 10%, for devices 10%, saving 5%",
    ]


def test_one_step_is_no_plural():
    assert summarise_run(1, 1, {}, (1, "examples"), None, None).startswith("1 step, up to step 1, in ")


def test_every_part_of_the_clock_has_a_word_in_the_summary():
    for part in get_args(Part):
        line = summarise_run(1, 1, {part: 1.0}, (1, "examples"), None, None).splitlines()[2]
        assert line.endswith(" 100%"), part


@pytest.mark.parametrize(("mode", "step"), [("max", 3), ("min", 2)])
def test_the_best_metric_is_the_one_that_ranks_checkpoints(tmp_path, mode, step):
    trainer, shown = make(Checkpoints(tmp_path, best="eval_accuracy", best_mode=mode))
    accuracies = {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.5}
    trainer.evaluate = lambda data, steps, global_batch_size: {
        "loss": 1.0 / trainer.step,
        "accuracy": accuracies[trainer.step],
    }
    trainer.fit(BATCHES, eval_data=BATCHES[:1], eval_every=1)
    assert f"best eval_accuracy {accuracies[step]:.4f} at step {step}; checkpoints" in shown.lines[-1]


def test_a_metric_that_no_row_has_is_not_the_best(tmp_path):
    trainer, shown = make(Checkpoints(tmp_path, best="accuracy"))
    with pytest.warns(UserWarning, match=r"Checkpoints\(best='accuracy'\): step 1 has no number of this name"):
        trainer.fit(BATCHES)
    assert "best" not in shown.lines[-1]


def test_sigterm_prints_the_summary_too(tmp_path):
    class Asked(Callback):
        def on_step(self, trainer, record):
            if record.step == 2:
                signal.raise_signal(signal.SIGTERM)

    trainer, shown = make(Checkpoints(tmp_path, every=10))
    with pytest.raises(SystemExit):
        trainer.fit(BATCHES, callbacks=[Asked()])
    assert shown.lines[-2].startswith("2 steps, up to step 2, in ")
    assert shown.lines[-1].startswith("SIGTERM: saved step 2, exiting with status ")


def advice(error):
    return error.value.__notes__[-1]


def test_an_error_says_from_which_checkpoint_to_go_on(tmp_path):
    trainer, _ = make(Checkpoints(tmp_path, every=2))
    with pytest.raises(RuntimeError, match="broken callback") as error:
        trainer.fit(BATCHES, callbacks=[Breaks()])
    assert advice(error) == (
        "Training stopped after step 3. Fix the cause and run again with fit(..., resume=True): it goes on from "
        f"step 2 of {tmp_path}."
    )
    other, _ = make(Checkpoints(tmp_path, every=2))
    other.fit(BATCHES, steps=4, resume=True)  # as it says
    assert other.step == 4


def test_an_error_without_checkpoints(tmp_path):
    with pytest.raises(RuntimeError) as error:
        make()[0].fit(BATCHES, callbacks=[Breaks()])
    assert "Nothing was saved: pass checkpoints=Checkpoints(directory, every=...)" in advice(error)
    with pytest.raises(RuntimeError) as error:
        make(Checkpoints(tmp_path, every=100))[0].fit(BATCHES, callbacks=[Breaks()])
    assert f"{tmp_path} holds no checkpoint yet" in advice(error)


def fails_after(batches):
    yield from batches
    raise OSError("the disk is gone")


def test_a_loop_of_the_users_own_gets_advice_too(tmp_path):
    trainer, _ = make(Checkpoints(tmp_path, every=2))
    with pytest.raises(OSError, match="the disk is gone") as error:
        list(trainer.training_steps(fails_after(BATCHES[:3])))
    assert advice(error) == (
        "Training stopped after step 3. Fix the cause and run again with trainer.restore() before "
        f"training_steps(the data after the saved step): it goes on from step 2 of {tmp_path}."
    )
    other, _ = make(Checkpoints(tmp_path, every=2))
    other.restore()
    assert [step for step, _ in other.training_steps(BATCHES[2:])] == [3, 4]  # as it says
    with pytest.raises(OSError, match="the disk is gone") as error:
        list(make()[0].training_steps(fails_after([])))
    assert not hasattr(error.value, "__notes__"), "before the first step"


def test_an_error_before_the_first_step_has_no_advice():
    with pytest.raises(BatchError, match="cannot be cut") as error:
        make()[0].fit([{"tokens": BATCHES[0]["tokens"][:3], "targets": BATCHES[0]["targets"][:3]}])
    assert not any("Training stopped" in note for note in getattr(error.value, "__notes__", ()))
