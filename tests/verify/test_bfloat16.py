"""Injected bugs of a model in bfloat16: rounding explains little of a block, as deep as it stands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from tests.trainers import models as m
from tests.trainers.test_matches_plain import make_trainer
from tests.verify.faults import MICROBATCHES, STAGES, all_faults
from tests.verify.test_faults import Bench

WIDTH = 8
# What rounds to bfloat16, or nearly so, is no bug there.
FAULTS = [fault for fault in all_faults() if "cast" not in fault.name and "in bfloat16" not in fault.name]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        options = {"assignment": "even", "tx": optax.sgd(0.1, momentum=0.9), "precision": "bfloat16"}
        trainer = make_trainer("nnx", "1f1b", STAGES, STAGES, MICROBATCHES, **options)
        yield Bench(patch, trainer, m.make_batch(4 * MICROBATCHES))


def test_what_a_late_block_reads_wrongly_is_found(monkeypatch: pytest.MonkeyPatch):
    """If the rounding of all blocks before counted, it would explain zeros."""
    blocks = [PipelineStage(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)), name=f"block_{i}") for i in range(STAGES)]
    trainer = PipelineTrainer(
        nnx.Sequential(*blocks), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=STAGES,
        num_microbatches=MICROBATCHES, precision="bfloat16", logging=False,
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(4 * MICROBATCHES, WIDTH)).astype(np.float32)
    (fault,) = (fault for fault in FAULTS if fault.name == "1 sends 2 zeros")
    first = Bench(monkeypatch, trainer, x).find(fault).first
    assert first is not None
    assert first.block in fault.blocks


@pytest.mark.slow
def test_all_faults_are_found(bench: Bench):
    firsts = {fault: bench.find(fault).first for fault in FAULTS}
    assert not [fault.name for fault, first in firsts.items() if first is None]
    elsewhere = [fault.name for fault, first in firsts.items() if first and first.block not in fault.blocks]
    assert len(elsewhere) <= len(FAULTS) // 10, elsewhere
