"""Rows of a run: times, operations and skipped steps, in a run of a real trainer and with a clock that stands still."""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import DictTracker, PipelineTrainer
from jaxpp_flax.trainers import Logging, LogMetrics, Throughput, Training
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics
from tests.trainers import models as m

ALL = ("step_time", "goodput", "skipped_steps", "utilization")
TIMES = {f"{part}_seconds" for part in ("step", "data", "dispatch", "device", "save", "evaluation")}
BATCHES = [m.make_batch(4, seed) for seed in range(4)]


def test_rows():
    time, skipped = [0.0], [5]
    clock = Clock(now=lambda: time[0])
    measures = RunMetrics(names=ALL, clock=clock, flops=lambda batch, size: 6.0, peak=2.0, skipped=lambda: skipped[0])

    def spend(part, seconds):
        with clock.part(part):
            time[0] += seconds

    spend("compilation", 10)
    assert measures.row(1, 0.0) == {"skipped_steps": 0}, "the first row would have the time of compilation"
    for _ in range(2):
        assert measures.count(BATCHES[0], None) == (20, "tokens")
        spend("data", 1)
        spend("dispatch", 2)
        spend("device", 3)
    spend("save", 4)
    measures.count(BATCHES[0], None)  # the next step, which has begun
    skipped[0] += 1
    row = measures.row(3, measures.operations - 6.0)
    assert row["utilization"] == 2 * 6 / 12 / 2, "two steps' operations over 12 seconds of training, and the peak"
    assert (row["step_seconds"], row["device_seconds"], row["save_seconds"]) == (8, 3, 2)
    assert row["goodput"] == 10 / 26
    assert row["skipped_steps"] == 1
    measures.begin()  # as a second `fit` does, which counts anew
    assert sum(measures.seconds().values()) == 0
    assert measures.row(4, 0.0) == {"skipped_steps": 0}
    spend("save", 1)
    spend("device", 3)
    assert measures.row(5, 0.0)["goodput"] == 3 / 4


@functools.cache
def fitted(stages):
    tracker = DictTracker()
    logging = Logging(
        tracker=tracker,
        every=1,
        progress=False,
        metrics=ALL,
        peak_flops=1e12,
        throughput=Throughput("words", "targets"),
    )
    trainer = PipelineTrainer(
        m.Model(2, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        m.mean_loss,
        num_stages=stages,
        num_microbatches=2,
        logging=logging,
    )
    trainer.fit(BATCHES, eval_data=BATCHES[:1], eval_every=2)
    return trainer, tracker.metrics


def test_the_rows_of_a_fit():
    trainer, rows = fitted(2)
    assert {*TIMES, "goodput", "skipped_steps", "utilization", "words_per_second"} <= set(rows)
    for step, whole in rows["step_seconds"].items():
        assert 0 < sum(rows[name][step] for name in TIMES - {"step_seconds"}) <= whole * (1 + 1e-6)
    assert rows["evaluation_seconds"][3] > 0, "step 2 had an evaluation"
    seconds = trainer.measures.seconds()
    assert seconds["compilation"] > seconds["dispatch"] > 0
    assert 0 < rows["goodput"][4] < 1


def test_skipped_steps():
    def loss(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2 * batch["scale"][:, None]).mean()

    scales = [1.0, np.nan, np.nan, 1.0]
    batches = [{**m.make_xy(4), "scale": np.full(4, scale, np.float32)} for scale in scales]
    tracker = DictTracker()
    trainer = PipelineTrainer(
        m.Layers(), optax.sgd(0.1), loss, num_stages=1, num_microbatches=2,
        training=Training(on_nonfinite="skip"),
        logging=Logging(tracker=tracker, every=1, progress=False, metrics=("skipped_steps",)),
    )  # fmt: skip
    for _ in trainer.training_steps(batches * 2, callbacks=[LogMetrics()]):
        pass
    assert tracker["skipped_step"][2] == 1
    assert tracker["skipped_steps"][8] == 3, "the last steps are still under way: counted when they are done"


def test_one_count_of_operations():
    """The operations of a step are those that the stages' rows count, and are the same for one stage."""
    piped, plain = fitted(2)[0], fitted(1)[0]
    counts = [made.measures.flops(BATCHES[0], None) for made in (piped, plain)]
    assert counts[0] == counts[1]
    (compiled,) = (of for key, of in piped.steps.compiled.items() if key[0] == "train")
    stages = 2 * sum(stage.flops for stage in compiled.stages)
    assert counts[0] == pytest.approx(stages, rel=0.1)  # stages add up gradients and cut microbatches, too
    products = 2 * 3 * sum(2 * m.WIDTH * 2 * m.WIDTH for _ in range(2)) + 2 * 3 * m.WIDTH * m.VOCABULARY
    assert 20 * products < counts[0] < 1.5 * 20 * products


def test_utilization_of_batches_with_a_number():
    tracker = DictTracker()
    logging = Logging(tracker=tracker, every=1, progress=False, metrics=("utilization",), peak_flops=1e12)
    trainer = PipelineTrainer(
        m.Layers(), optax.sgd(0.1), lambda model, batch: m.squared_error(model, batch) * batch["scale"],
        num_stages=1, num_microbatches=2, logging=logging,
    )  # fmt: skip
    trainer.fit([{**m.make_xy(4), "scale": 0.5}] * 3)
    assert all(tracker["utilization"][step] > 0 for step in (2, 3)), "the last row has its own operations too"


def test_utilization_needs_a_peak():
    options = {"num_stages": 1, "num_microbatches": 2}
    with pytest.raises(ValueError, match=r'"utilization", and the peak of a device of kind .* Logging\(peak_flops=\)'):
        PipelineTrainer(
            m.Layers(), optax.sgd(0.1), m.squared_error, logging=Logging(metrics=["utilization"]), **options
        )
    made = PipelineTrainer(m.Layers(), optax.sgd(0.1), m.squared_error, logging=Logging(metrics=True), **options)
    assert made.measures.names == ("step_time", "goodput", "skipped_steps")
    with pytest.raises(TypeError, match=r"learning_rate='1e-3' \(str\): it must be a number, or a schedule"):
        Logging(learning_rate="1e-3")
    with pytest.raises(ValueError, match=r"peak_flops=0: it must be above 0"):
        Logging(peak_flops=0)
    with pytest.raises(TypeError, match=r"throughput='tokens' \(str\): it must be a Throughput"):
        Logging(throughput="tokens")  # pyright: ignore[reportArgumentType]
