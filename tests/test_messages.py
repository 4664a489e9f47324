"""Warnings show the line of the user's program, from whatever depth they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import MicrobatchLossWarning, PrecisionWarning, UnusedParametersWarning
from tests.running import ROOT

BATCH = np.ones((8, 4), np.float32)


class Block(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
        self.unused = nnx.Param(jnp.ones(4))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def masked_mean(model: Any, x: Any) -> Any:
    return (model(x) ** 2).sum() / (x > 0).sum()


# The line that a warning shows is the first of each body.
def fit(trainer: PipelineTrainer) -> None:
    trainer.fit([BATCH], steps=1)


def train_step(trainer: PipelineTrainer) -> None:
    trainer.train_step(BATCH)


def own_loop(trainer: PipelineTrainer) -> None:
    for _ in trainer.training_steps([BATCH]):
        pass


@pytest.mark.parametrize("call", [fit, train_step, own_loop])
def test_a_warning_shows_the_line_that_calls_the_trainer(call: Callable[[PipelineTrainer], None]):
    model = nnx.Sequential(*[PipelineStage(Block()) for _ in range(2)])
    options = {"num_stages": 2, "num_microbatches": 2, "precision": "bfloat16", "logging": False}
    trainer = PipelineTrainer(model, optax.sgd(0.1), masked_mean, **options)
    with pytest.warns() as told:
        call(trainer)
    assert {warning.category for warning in told} == {UnusedParametersWarning, MicrobatchLossWarning, PrecisionWarning}
    first = call.__code__.co_firstlineno + 1
    assert {(warning.filename, warning.lineno) for warning in told} == {(__file__, first)}


def test_no_other_module_counts_the_calls_up_to_the_user():
    files = (ROOT / "jaxpp_flax").rglob("*.py")
    assert not [file.name for file in files if "warnings.warn(" in file.read_text()]
