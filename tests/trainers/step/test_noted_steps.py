"""Which steps the launcher hears of: it tells from them how far a run has come, and whether to start it again."""

from __future__ import annotations

import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.processes.group import process_group
from tests.trainers import models as m


def test_training_steps_are_noted_and_evaluations_are_not(monkeypatch: pytest.MonkeyPatch):
    noted: list[int] = []
    monkeypatch.setattr(process_group(), "on_step", noted.append)
    options = {"num_stages": 1, "num_microbatches": 2, "logging": False}
    trainer = PipelineTrainer(m.Layers(), optax.sgd(0.1), m.squared_error, **options)
    batch = m.make_xy(4)
    trainer.evaluate([batch])
    assert noted == []
    for _ in range(2):
        trainer.train_step(batch)
    trainer.evaluate([batch])
    assert noted == [1, 2]
    assert process_group().step == 2  # messages name it all the same
