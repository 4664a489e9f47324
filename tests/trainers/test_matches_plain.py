"""The trainer's pipelines against plain `jax.jit` with gradient accumulation: the same losses and parameters.

After one step of plain SGD the parameters show the gradients; after five, everything.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers import Inference
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

STEPS = 5
RATE = 0.1
# `tests/engine/test_matches_plain.py` has every schedule and shape; `test_equal_bits.py` each schedule of a trainer.
CASES = [
    slow("nnx", "1f1b", 1, 1, 1),
    slow("nnx", "eager_1f1b", 3, 3, 5),
    ("nnx", "interleaved_1f1b", 4, 2, 4),
    ("linen", "1f1b", 2, 2, 3),
    slow("linen", "interleaved_1f1b", 8, 4, 8),
]


def mesh_of(ranks, **axes):
    shape = (ranks, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("stage", *axes))


def batches(num_microbatches):
    return [m.make_batch(2 * num_microbatches, seed) for seed in range(STEPS)]


@functools.cache
def reference(kind, num_blocks, num_microbatches):
    """Losses of all steps, and the parameters after the first and the last one, in plain JAX."""
    tx = optax.sgd(RATE)
    data = batches(num_microbatches)
    if kind == "nnx":
        losses, params = m.plain_training(
            m.Tokens(num_blocks, rngs=nnx.Rngs(0)), tx, m.mean_loss, data, num_microbatches
        )
        return losses, nnx.to_pure_dict(params[0]), nnx.to_pure_dict(params[-1])
    module = m.LinenModel(num_blocks, marked=False)

    def loss_of(params, microbatch):
        return m.mean_loss(lambda x: module.apply({"params": params}, x), microbatch)

    start = jax.jit(module.init)(jax.random.key(0), data[0]["tokens"])["params"]
    losses, params = m.accumulated(loss_of, start, tx, data, num_microbatches)
    return losses, params[0], params[-1]


def make_trainer(kind, schedule, stages, ranks, count, **options):
    options = {"logging": False, "mesh": mesh_of(ranks), **options}
    common = {"num_stages": stages, "num_microbatches": count, "schedule": schedule, **options}
    tx = common.pop("tx", optax.sgd(RATE))
    loss_fn = common.pop("loss_fn", m.mean_loss)
    num_blocks = common.pop("num_blocks", stages)
    model_options = common.pop("model_options", {})
    if kind == "nnx":
        make = m.Model if model_options else m.Tokens  # of a model, each block has the options
        return PipelineTrainer(make(num_blocks, rngs=nnx.Rngs(0), **model_options), tx, loss_fn, **common)
    module = m.LinenModel(num_blocks, **model_options)
    variables = jax.jit(module.init)(jax.random.key(0), m.make_batch(2)["tokens"])
    return PipelineTrainer(module, tx, loss_fn, variables=variables, **common)


def parameters(kind, trainer):
    return (
        nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.Param))
        if kind == "nnx"
        else trainer.gather_variables()["params"]
    )


@pytest.mark.parametrize(("kind", "schedule", "stages", "ranks", "count"), CASES)
def test_equals_plain_jit(kind, schedule, stages, ranks, count):
    losses, first, last = reference(kind, stages, count)
    trainer = make_trainer(kind, schedule, stages, ranks, count)
    found = []
    for batch in batches(count):
        found.append(float(trainer.train_step(batch)["loss"]))
        if len(found) == 1:
            tree_allclose(parameters(kind, trainer), first)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert [f"{loss:.4f}" for loss in found] == [f"{loss:.4f}" for loss in losses]
    tree_allclose(parameters(kind, trainer), last)


MOMENTUM = "momentum and clipping"
FEATURES: dict[str, Any] = {
    "batch norm": {"model_options": {"batch_norm": True}},
    "dropout": {"model_options": {"dropout": 0.3}},
    "weights": {"loss_fn": m.weighted_loss},
    "metrics": {"loss_fn": m.loss_with_metrics},
    MOMENTUM: {"tx": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(RATE, momentum=0.9))},
    "more blocks than stages": {"num_blocks": 5},
    "assignment": {"num_blocks": 5, "assignment": [1, 4]},
}


def loss_with_all(model, batch):
    """A weighted loss with metrics."""
    losses, metrics = m.loss_with_metrics(model, batch)
    return (losses * batch["mask"].sum(), batch["mask"].sum()), metrics


# One step has them all: every part of it is compared.
TOGETHER = FEATURES[MOMENTUM] | {
    "model_options": {"batch_norm": True, "dropout": 0.3},
    "loss_fn": loss_with_all,
}


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
@pytest.mark.parametrize(
    ("kind", "feature"), [("nnx", "together"), slow("linen", "together"), *(slow("nnx", name) for name in FEATURES)]
)
def test_features_equal_the_same_step_in_one_stage(kind, feature):
    """A trainer of one stage runs the whole step under plain `jax.jit`, with the same keys."""
    options = {"num_blocks": 2} | FEATURES.get(feature, TOGETHER)
    piped = make_trainer(kind, "1f1b", 2, 2, 2, **options)
    plain = make_trainer(kind, "1f1b", 1, 1, 2, **{**options, "assignment": "even", "mesh": None})
    for batch in batches(2)[:2]:
        tree_allclose(*(dict(trainer.train_step(batch)) for trainer in (piped, plain)))
    tree_allclose(*(_arrays(trainer.state) for trainer in (piped, plain)))


def _arrays(state):
    """The parameters, the optimizer's state and what else the model has, without keys."""
    parts = flatten((state.params, state.opt_state, state.model_state))[0]
    return {path: np.asarray(leaf) for path, leaf in parts.items() if not is_key(leaf)}


@pytest.mark.parametrize("kind", ["nnx", slow("linen")])
def test_evaluate_and_predict_before_between_and_after_training(kind):
    inference = Inference(predict_fn=lambda model, b: model(b["tokens"]))
    trainer = make_trainer(kind, "1f1b", 2, 2, 4, inference=inference)
    data = m.make_batch(8, 100)
    cut = lambda size: {name: array[:size] for name, array in data.items()}  # noqa: E731
    for batch in [*batches(4)[:2], None]:
        logits = _logits(kind, trainer, data["tokens"])
        for size in (8, 3):
            tree_allclose(trainer.predict(cut(size)), logits[:size])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"]).mean(-1)
        every = np.concatenate([losses, losses[:1]])
        np.testing.assert_allclose(trainer.evaluate([data, cut(1)])["loss"], every.mean(), rtol=1e-5)
        if batch is not None:
            trainer.train_step(batch)


def _logits(kind, trainer, tokens):
    """The gathered model's, without the trainer."""
    model = trainer.gather_model()
    return nnx.jit(lambda model: model(tokens))(model) if kind == "nnx" else model(tokens)


def loss_with_vectors(model, batch):
    """Metrics that are counted over the examples of a microbatch and then cut off: not those of its shards, added."""
    tokens = batch["tokens"]
    present = jax.nn.one_hot(tokens, m.VOCABULARY).sum((0, 1)).astype(bool)
    return m.mean_loss(model, batch), {"present": present, "frac": (tokens >= 0).mean(0).astype(jnp.int32)}


def test_data_parallel_stages():
    losses, _, last = reference("nnx", 2, 4)
    trainer = make_trainer("nnx", "1f1b", 2, 2, 4, mesh=mesh_of(2, data=2), loss_fn=loss_with_vectors)
    found = [trainer.train_step(batch) for batch in batches(4)]
    np.testing.assert_allclose([float(metrics["loss"]) for metrics in found], losses, rtol=1e-5)
    tree_allclose(parameters("nnx", trainer), last)
    for metrics, batch in zip(found, batches(4), strict=True):
        microbatches = batch["tokens"].reshape(4, -1)
        present = np.mean([np.isin(np.arange(m.VOCABULARY), tokens) for tokens in microbatches], 0)
        np.testing.assert_array_equal(metrics["present"], present.astype(np.float32))
        np.testing.assert_array_equal(metrics["frac"], np.ones(m.LENGTH, np.float32))
