"""`fit`: data, epochs, evaluation, callbacks, trackers, progress."""

from __future__ import annotations

import io
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from jaxpp_flax import DictTracker, JsonlTracker, PipelineTrainer
from jaxpp_flax.trainers import Callback, CompositeTracker, Evaluate, Logging
from jaxpp_flax.trainers.callbacks import EarlyStopping, OnMetrics
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.trackers import TensorBoardTracker
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps


@sharing_steps("tracker", "every", "progress")
def trainer(num_stages=1, tracker=None, every=2, progress=False, **options):
    options["logging"] = Logging(tracker=tracker, every=every, progress=progress)
    tx = options.pop("tx", optax.sgd(0.1))
    loss_fn = options.pop("loss_fn", m.mean_loss)
    model = m.Tokens(1, rngs=nnx.Rngs(0))
    return PipelineTrainer(model, tx, loss_fn, num_stages=num_stages, num_microbatches=2, **options)


DATA = [m.make_batch(4, seed) for seed in range(3)]


class Loader:
    """Data that can be iterated again and has no length, as a grain dataset."""

    def __iter__(self):
        return iter(DATA)


class WithoutLength(Loader):
    """Such as torch's DataLoader over an IterableDataset."""

    def __init__(self, error: Exception):
        self.error = error

    def __len__(self):
        raise self.error


def generator():
    yield from DATA


@pytest.mark.parametrize("error", [TypeError(), NotImplementedError(), OSError("the server is away")], ids=repr)
def test_a_length_that_raises_is_not_known(error: Exception):
    assert Batches(WithoutLength(error), epochs=2).steps_left() is None
    assert Batches(WithoutLength(error), steps=5).steps_left() == 5
    for options, steps in [({"steps": 5}, 5), ({"epochs": 2}, 6), ({}, 3), ({"steps": 3, "remainder": "drop"}, 3)]:
        trained = trainer(progress=True)
        trained.fit(WithoutLength(error), **options)
        assert trained.step == steps
    assert "loss" in trained.evaluate(WithoutLength(error))


def test_kinds_of_data():
    for data, options, steps in [
        (DATA, {}, 3),
        (DATA, {"steps": 5}, 5),
        (DATA, {"epochs": 2}, 6),
        (DATA, {"epochs": 2, "steps": 4}, 4),
        (Loader(), {"steps": 7}, 7),
        (Loader(), {"epochs": 2}, 6),
        (generator(), {}, 3),
        (generator(), {"steps": 2}, 2),
        (generator(), {"epochs": 1}, 3),
        (iter(DATA), {}, 3),
        (zip(DATA, strict=True), {}, 3),
    ]:
        assert len(list(Batches(data, **options))) == steps, (data, options)


def test_data_that_runs_once():
    with pytest.raises(ValueError, match=r"epochs=2 needs data that can be iterated again, but a generator runs once"):
        Batches(generator(), epochs=2)
    with pytest.warns(UserWarning, match=r"data ended after 3 of 5 steps: a generator runs once"):
        assert len(list(Batches(generator(), steps=5))) == 3
    with pytest.raises(ValueError, match=r"data \(a list\) held no batch"):
        list(Batches([], steps=2))
    with pytest.raises(TypeError, match=r"data is a int, which cannot be iterated"):
        Batches(3)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"it must be a whole number of at least 1"):
            Batches(DATA, steps=wrong)


class Table:
    """As a DataFrame: to iterate over it gives the names of columns."""

    shape = (4, 2)

    def __array__(self, dtype=None, copy=None):
        return np.zeros(self.shape)

    def __iter__(self):
        return iter("xy")


def test_one_batch_is_no_iterable_of_batches():
    t, array = trainer(), DATA[0]["tokens"]
    for one, text in [
        (DATA[0], r"is a dict of 'tokens'.*one batch\?.*`\[batch\]`"),
        (array, r"is an array \(ndarray\) of shape \(4, 5\): one batch\?.*`\[batch\]`.*`list\(array\)`"),
        (jnp.asarray(array), r"is an array .* of shape \(4, 5\): one batch\?.*`\[batch\]`"),
        (Table(), r"is a Table, not an iterable of batches.*`\[\{column: np.asarray"),
        ("train.parquet", r"is a str, not an iterable of batches"),
    ]:
        for call in (t.fit, t.evaluate, lambda of: next(t.training_steps(of))):
            with pytest.raises(TypeError, match=f"data {text}"):
                call(one)
        with pytest.raises(TypeError, match=f"eval_data {text}"):
            t.fit(DATA, eval_data=one)
    assert t.step == 0


class Record(Callback):
    def __init__(self, **options):
        super().__init__(**options)
        self.events = []

    def on_fit_start(self, trainer):
        self.events.append("start")

    def on_step(self, trainer, record):
        assert trainer.step == record.step
        self.events.append(("step", record.step))

    def on_metrics(self, trainer, step, metrics):
        assert isinstance(metrics["loss"], float)
        self.events.append(("metrics", step))

    def on_evaluate(self, trainer, step, metrics):
        self.events.append(("evaluate", step))

    def on_fit_end(self, trainer, error):
        self.events.append("end")


class EmptyAtFirst(DictTracker):
    """A tracker that is false until it holds something, as any class with a length is."""

    def __len__(self):
        return len(self.metrics)


def test_an_empty_tracker_is_a_tracker():
    tracker = EmptyAtFirst()
    assert trainer(tracker=tracker).tracker is tracker


def test_fit_with_callbacks_trackers_and_evaluation(tmp_path):
    record, losses, kept = Record(every=2), {}, DictTracker()
    path = tmp_path / "run" / "metrics.jsonl"
    t = trainer(tracker=CompositeTracker(kept, JsonlTracker(path)))
    last = t.fit(
        generator(),
        eval_data=DATA,
        eval_every=2,
        callbacks=[record, OnMetrics(lambda step, metrics: losses.update({step: metrics["loss"]}))],
    )
    assert t.step == 3
    # Metrics come one step late, and before an evaluation those that are pending.
    assert record.events == ["start", ("step", 2), ("metrics", 2), ("evaluate", 2), ("evaluate", 3), "end"]
    assert set(losses) == {1, 2, 3}
    assert last["loss"] == losses[3]
    assert last["eval_loss"] == pytest.approx(t.evaluate(DATA)["loss"])
    assert kept["loss"] == losses
    assert set(kept["eval_loss"]) == {2, 3}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    # The same numbers as a loop of one's own.
    other = trainer()
    own = {step: float(metrics["loss"]) for step, metrics in other.training_steps(DATA)}
    assert own == losses


def test_stopping():
    t = trainer()
    t.fit(DATA, steps=50, callbacks=[OnMetrics(lambda step, metrics: t.stop("enough") if step == 3 else None)])
    assert t.step == 4  # one step later, since metrics are
    assert t.stopping == "enough"
    t = trainer(tx=optax.sgd(0.0))
    t.fit(DATA, steps=50, eval_data=DATA[:1], eval_every=1, callbacks=[EarlyStopping(patience=2)])
    assert t.step == 3


def test_a_pass_over_eval_data_begins_only_for_an_evaluation():
    """An iterator of a data loader starts its workers."""
    begun = []

    class Workers(Loader):
        def __iter__(self):
            begun.append(self)
            return super().__iter__()

    trainer().fit(DATA, steps=2, eval_data=Workers(), eval_every=1)
    assert len(begun) == 2


def test_refusals():
    with pytest.raises(TypeError, match=r"callbacks holds a function; subclass jaxpp_flax.trainers.Callback, or wrap"):
        trainer().fit(DATA, callbacks=[test_refusals])
    with pytest.raises(ValueError, match=r"Record: every=0: it must be a whole number"):
        Record(every=0)
    with pytest.raises(ValueError, match=r"eval_every=1 needs eval_data that can be iterated again"):
        trainer().fit(DATA, eval_data=generator(), eval_every=1)
    with pytest.raises(ValueError, match=r"evaluate got data \(a list\) without a single batch"):
        trainer().evaluate([])
    with pytest.raises(KeyError, match=r"EarlyStopping watches 'accuracy'; the evaluation has loss"):
        trainer().fit(DATA, eval_data=DATA, callbacks=[EarlyStopping("accuracy")])
    with pytest.raises(ValueError, match="EarlyStopping counts evaluations: pass eval_data= and eval_every="):
        trainer().fit(DATA, callbacks=[EarlyStopping()])


def test_plain_progress(capsys):
    t = trainer(num_stages=2, progress=True)
    t.fit(
        DATA,
        steps=5,
        callbacks=[OnMetrics(lambda step, metrics: t.message(f"step {step}  loss {metrics['loss']:.5f}"), every=2)],
    )
    text = capsys.readouterr().out
    assert "compiling 2 stages, " in text
    assert "2 stages on 2 ranks" in text
    assert "block_0" in text
    assert "step 1/5  loss 2." in text
    assert "tokens/s" in text
    assert "ETA 0:00:0" in text
    assert "\nstep 4  loss 2." in text
    assert text.index("compiling") < text.index("block_0") < text.index("step 1/5")
    assert "step 3/5" not in text  # every=2


def test_bars_and_lines_go_to_a_console():
    stream = io.StringIO()
    bar = Display(console=Console(file=stream, force_terminal=True, width=100))
    with bar.phase("compiling"):
        pass
    bar.start(10, 0)
    bar.advance(3)
    bar.update(3, {"loss": 1.25, "weight": 3.0}, 1500.0, "tokens", 3725.0)
    bar.message("hello")
    bar.stop()
    text = stream.getvalue()
    assert re.search(r"compiling: \d\.\d s", text)  # a busy machine takes some tenths
    for part in ("3/10", "loss 1.2500", "1.5k tokens/s", "ETA 1:02:05", "hello"):
        assert part in text
    assert "weight" not in text
    stream = io.StringIO()
    plain = Display(console=Console(file=stream))
    plain.start(None, 0)
    plain.update(3, {"loss": 1.25}, None, "tokens", None)
    assert stream.getvalue() == "step 3  loss 1.2500\n"


def test_without_progress_the_messages_stay(capsys: pytest.CaptureFixture[str]):
    display = Display(progress=False)
    display.start(10, 0)
    display.update(3, {"loss": 1.25}, None, "tokens", None)
    display.message("hello")
    assert capsys.readouterr().out == "hello\n"


def test_a_narrow_terminal_shows_loss_rate_and_time_left_whole():
    metrics = {"gradient_norm": 2.0, "learning_rate": 0.01, "loss": 1.25, "parameter_norm": 8.6, "update_ratio": 0.02}
    stream = io.StringIO()
    bar = Display(console=Console(file=stream, force_terminal=True, width=80))
    bar.start(100, 0)
    bar.update(3, metrics, 1500.0, "tokens", 3725.0)
    bar.stop()
    text = stream.getvalue()
    for part in ("0/100", "loss 1.2500", "1.5k tokens/s", "ETA 1:02:05", "gradient_norm"):
        assert part in text
    assert "update_ratio" not in text


def test_metrics_are_fetched_one_step_late_and_only_when_wanted(monkeypatch):
    from jaxpp_flax.trainers.callbacks import log_metrics

    t = trainer(every=4)
    fetched = []
    original = log_metrics.to_host
    monkeypatch.setattr(log_metrics, "to_host", lambda metrics: fetched.append(t.step) or original(metrics))
    t.fit(DATA, steps=9)
    assert fetched == [2, 5, 9, 9]  # of the steps 1, 4, 8 and 9


def test_missing_packages_are_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"needs the package 'tensorboardX', .* 'jaxpp-flax\[tensorboard\]'"):
        TensorBoardTracker("logs")


def test_jsonl_writes_what_json_lacks(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log_config({"rate": 0.1, "shape": (2, 3), "tx": optax.sgd})
    tracker.log({"loss": math.nan, "per_class": np.ones(2), "norm": np.float32(2)}, step=1)
    tracker.close()
    lines = [json.loads(line) for line in tracker.path.read_text().splitlines()]
    assert lines[0]["config"]["shape"] == [2, 3]
    assert lines[1] == {"step": 1, "loss": "nan", "per_class": [1.0, 1.0], "norm": 2.0}


def test_one_process_reads_every_row():
    sut = trainer(num_stages=2)
    rows = sut.rows_read(DATA[0])
    assert {name: list(of) for name, of in rows.items()} == {name: [0, 1, 2, 3] for name in DATA[0]}
    expected = trainer(num_stages=2).fit(DATA)["loss"]
    assert sut.fit(DATA, global_batch_size=4)["loss"] == expected
    with pytest.raises(BatchError, match=r"global_batch_size=8, but the batch has 4 examples.*\(8, 5\)"):
        sut.fit(DATA, global_batch_size=8)
    with pytest.raises(ValueError, match="global_batch_size=0: it must be"):
        sut.train_step(DATA[0], global_batch_size=0)


def test_the_shape_of_the_whole_batch_is_found_once_a_step(monkeypatch):
    found = []
    whole = BatchSharding.whole
    monkeypatch.setattr(BatchSharding, "whole", lambda *arguments: found.append(1) or whole(*arguments))
    trainer().fit(DATA, global_batch_size=4)
    assert len(found) == 1 + len(DATA)  # once for the compilation


def test_several_sets_are_named_in_the_log_the_result_and_by_early_stopping():
    tracker, sets = DictTracker(), {"books": DATA, "code": DATA[:1]}
    made = trainer(tracker=tracker)
    result = made.fit(DATA, steps=6, eval_data=sets, eval_every=1, eval_steps=2, callbacks=[
        EarlyStopping("eval_code/loss", patience=1, mode="max"),
    ])  # fmt: skip
    assert made.step == 2, "its loss falls, and does not rise once"
    expected = {f"eval_{name}": value for name, value in made.evaluate(sets, steps=2).items()}
    assert {name: result[name] for name in expected} == expected == {n: tracker[n][2] for n in expected}
    assert sorted(tracker["eval_books/loss"]) == [1, 2]


@pytest.mark.parametrize("watched", ["loss", "eval_loss", "other/loss"])
def test_early_stopping_of_no_set_is_refused_before_the_first_step(watched):
    made = trainer()
    with pytest.raises(ValueError, match=r"the sets 'a', 'b'\. Name the metric of one of them: 'a/loss', 'b/loss'"):
        made.fit(DATA, eval_data={"a": DATA, "b": DATA}, eval_every=1, callbacks=[EarlyStopping(watched)])
    assert made.step == 0


def test_the_arguments_of_evaluations_are_checked_before_the_first_step():
    made = trainer()
    with pytest.raises(ValueError, match="eval_steps=2, but there is nothing to evaluate"):
        made.fit(DATA, eval_steps=2)
    with pytest.raises(ValueError, match="eval_every=2 needs eval_data that can be iterated again"):
        made.fit(DATA, eval_data={"a": DATA, "b": iter(DATA)}, eval_every=2)
    with pytest.raises(TypeError, match=r"Evaluate: data\['a'\] is a dict of"):
        Evaluate({"a": DATA[0]})
    assert made.step == 0


def test_the_best_of_several_sets_is_that_of_the_first_one(capsys):
    trainer(progress=True).fit(DATA, steps=2, eval_data={"books": DATA, "code": DATA[:1]}, eval_every=1)
    assert re.search(r"best eval_books/loss \S+ at step 2", capsys.readouterr().out)
