"""What the trainer tells the process group of itself, for its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.coordination import process_group
from jaxpp_flax.trainers.data import awaited, batches


@pytest.mark.parametrize(("kind", "step"), [("train", 13), ("evaluate", 12)])
def test_the_step_in_messages_is_the_trainer_s(kind: str, step: int):
    compiled = object()
    after_step_12: Any = SimpleNamespace(_step=12, _key=lambda kind, microbatches: kind, _executables={kind: compiled})
    assert PipelineTrainer._executable(after_step_12, kind, None, lambda: None, donate=True) is compiled
    assert process_group().step == step


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda data: batches(data), "the next batch of the data"),
        (lambda data: awaited(data, "the next batch to evaluate"), "the next batch to evaluate"),
    ],
)
def test_data_that_take_long_are_waited_for_by_name(draw: Any, what: str):
    seen: list[list[str]] = []

    def data() -> Any:
        for batch in range(2):
            seen.append(process_group().waits())
            yield batch

    assert list(draw(data())) == [0, 1]
    assert seen == [[what], [what]]
    assert process_group().waits() == []
