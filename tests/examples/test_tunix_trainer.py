"""The adapter for tunix, with a stand-in that has the classes and makes the calls of tunix's `TrainerWorker`."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.test_accumulation import of_module, plain_steps

FILE = Path(__file__).parents[2] / "examples" / "loops" / "tunix_trainer.py"
BATCHES = [m.make_batch(4, seed) for seed in range(2)]


@dataclass
class Payload:
    token_ids: np.ndarray
    targets: np.ndarray
    token_mask: np.ndarray
    segment_ids: np.ndarray | None = None


@dataclass
class MetricsBuffer:
    id: Any
    scalar_metrics: dict[str, Any] = field(default_factory=dict)
    mode: str = "train"


@dataclass
class WeightedMetric:
    unreduced_sum: Any
    denominator: Any


@dataclass
class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: dict[str, Any]


@pytest.fixture
def adapter(monkeypatch):
    metrics, abstract = ModuleType("metrics"), ModuleType("abstract_trainer")
    metrics.MetricsBuffer, abstract.AbstractTrainer = MetricsBuffer, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tunix.experimental.metrics.metrics", metrics)
    monkeypatch.setitem(sys.modules, "tunix.experimental.train.abstract_trainer", abstract)
    spec = importlib.util.spec_from_file_location("tunix_trainer", FILE)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tunix_trainer", module)
    spec.loader.exec_module(module)
    return module


def inputs_of(payload: Payload) -> dict[str, Any]:
    mask, segments = payload.token_mask, payload.segment_ids
    return {"tokens": payload.token_ids, "targets": payload.targets, "mask": mask, "segments": segments}


def weighted(model, tokens, targets, mask):
    total, weight = m.weighted_loss(model, {"tokens": tokens, "targets": targets, "mask": mask})
    return LossOutput(WeightedMetric(total, weight), {"kl": WeightedMetric(total * 2, weight)})


def test_the_calls_of_a_worker_give_plain_training(adapter, tmp_path):
    module, tx = m.Tokens(rngs=nnx.Rngs(0)), optax.adam(0.1)
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False, "checkpoints": tmp_path / "run"}
    trainer = adapter.PipelinedTrainer(adapter.PipelinedConfig(model=module, tx=tx, options=options))
    trainer.with_loss_fn(weighted, True).with_gen_model_input_fn(inputs_of)
    payloads = [Payload(batch["tokens"], batch["targets"], batch["mask"]) for batch in BATCHES]
    trainer.compile(payloads[0])
    assert trainer.restore_checkpoint() == {}
    losses = list[float]()
    for step in (1, 2):
        for payload in payloads:
            trainer.fwd_bwd(payload)
        assert trainer.update() == step
        found = trainer.get_metrics()
        assert found.id == step
        losses.append(float(found.scalar_metrics["loss"]))
        np.testing.assert_allclose(float(found.scalar_metrics["kl"]), 2 * losses[-1], rtol=1e-6)
        assert trainer.get_metrics().id == -1
        if step == 1:
            trainer.save_checkpoint({"global_step": 7})
    loss_of, params = of_module(m.Tokens(rngs=nnx.Rngs(0)), m.weighted_loss)
    expected, after = plain_steps(loss_of, params, tx, BATCHES, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    weights = jax.tree.map(np.asarray, trainer.prepare_weight_sync())
    tree_allclose(weights, jax.tree.map(np.asarray, after))
    trainer.eval_step(payloads[0])
    assert trainer.get_metrics().mode == "eval"
    trainer.fwd_bwd(payloads[0])
    with pytest.raises(RuntimeError, match="would drop the gradients of 1 batch"):
        trainer.with_loss_fn(weighted, True)
    assert trainer.restore_checkpoint() == {"global_step": 7}
    assert trainer.trainer.step == 1
    trainer.with_loss_fn(lambda model, **batch: (m.mean_loss(model, batch), None), has_aux=True)
    for payload in payloads:
        trainer.fwd_bwd(payload)
    assert trainer.update() == 2  # goes on from the state of the loss before
    trainer.close()
