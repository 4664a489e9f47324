"""The generator of steps that `fit` and `training_steps` consume, with a trainer that only counts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxpp_flax.trainers.loop.hooks import LogMetrics, StepRecord, run_steps
from jaxpp_flax.trainers.loop.trackers import DictTracker
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.metrics.run_metrics import RunMetrics

BATCHES = [np.zeros((4, 2)), np.zeros((2, 2)), np.zeros((4, 2))]


class Counts:
    """Takes steps, and says so in `events`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.step = 0

    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]:
        self.step += 1
        self.events.append(f"step {self.step}")
        return {"loss": self.step / 10}

    @contextmanager
    def within(self) -> Generator[None]:
        self.events.append("enter")
        yield
        self.events.append("exit")

    def begin(self, batch: Any) -> bool:
        self.events.append("begin")
        return True


def records(trainer: Any, begin: Any) -> Any:
    hooks = [lambda record: trainer.events.append(f"hook {record.step}")]
    return run_steps(trainer, iter(BATCHES), None, hooks, begin=begin, within=trainer.within)


def test_the_rate_counts_the_time_of_training_alone():
    now = [0.0]
    trainer: Any = Counts()
    trainer.measures, trainer.tracker, trainer.log_every = RunMetrics(clock=Clock(lambda: now[0])), DictTracker(), 1
    log = LogMetrics(trainer)
    for batch in BATCHES[:1] * 5:
        now[0] += 2
        with trainer.measures.clock.part("save"):
            now[0] += 10
        log(StepRecord(trainer.step + 1, trainer.train_step(batch), batch))
    assert trainer.tracker["examples_per_second"] == {2: 2.0, 3: 2.0, 4: 2.0}


def test_each_batch_is_a_record():
    trainer = Counts()
    found = list(records(trainer, trainer.begin))
    assert [(record.step, record.metrics) for record in found] == [(n, {"loss": n / 10}) for n in (1, 2, 3)]
    assert [record.batch for record in found] == BATCHES
    assert [record.count_units() for record in found] == [(len(batch), "examples") for batch in BATCHES]
    assert trainer.events == ["begin", *(of for n in (1, 2, 3) for of in ("enter", f"step {n}", "exit", f"hook {n}"))]


def test_units_are_those_of_the_whole_batch():
    tokens = {"tokens": np.zeros((2, 3), np.int32)}  # two of the eight sequences are this process's
    (of_examples,) = run_steps(Counts(), [np.zeros((2, 2))], 8, [], begin=lambda batch: True)
    (of_tokens,) = run_steps(Counts(), [tokens], 8, [], begin=lambda batch: True)
    assert of_examples.count_units() == (8, "examples")
    assert of_tokens.count_units() == (24, "tokens")


def test_a_step_is_taken_when_its_record_is_asked_for():
    trainer = Counts()
    following = records(trainer, trainer.begin)
    next(following)
    assert trainer.step == 1


def test_the_beginning_may_end_it():
    trainer = Counts()
    assert list(records(trainer, lambda batch: False)) == []
    assert trainer.events == []
