"""Evaluation and prediction of batches that the data-parallel devices of a stage cannot share evenly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Inference
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from tests.helpers import tree_allclose
from tests.trainers import models as m

pytestmark = pytest.mark.usefixtures("verified")


def loss(model, batch):
    """A loss and metrics of which padding would change each: a mean, a pair, and one that repeated rows change too."""
    logits = model(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    mask = batch["mask"]
    return ((losses * mask).sum(), mask.sum()), {
        "rate": batch["rate"],
        "mean": losses.mean(),
        "examples": (losses.shape[0], 1.0),
    }


def predict(model, batch):
    logits = model(batch["tokens"])
    return {"logits": logits, "sum": logits.sum()}


def make_trainer(model=None, **options):
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": {"data": 2}, "logging": False, **options}
    return PipelineTrainer(
        model or m.Tokens(rngs=nnx.Rngs(0)), optax.sgd(0.1), loss, inference=Inference(predict_fn=predict), **options
    )


def test_nothing_is_padded():
    trainer, model = make_trainer(), nnx.jit(m.Tokens(rngs=nnx.Rngs(0)))
    whole = m.make_batch(4)
    one, three = (
        {**{name: leaf[rows] for name, leaf in whole.items()}, "rate": 0.5} for rows in (slice(0, 1), slice(1, 4))
    )
    found = trainer.evaluate([one, three])
    logits = model(whole["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, whole["targets"])
    np.testing.assert_allclose(found["loss"], (losses * whole["mask"]).sum() / whole["mask"].sum(), rtol=1e-5)
    assert found["rate"] == 0.5, "a scalar is the same for each part of a batch"
    np.testing.assert_allclose(found["mean"], losses.mean(), rtol=1e-5)
    assert found["examples"] == 4 / 3, "one example, then two, then one: in three microbatches"
    for batch, expected in ((one, logits[:1]), (three, logits[1:])):
        outputs = trainer.predict(batch)
        tree_allclose(outputs["logits"], expected)
        # A sum of 55 to 165 numbers near 1 in another order.
        np.testing.assert_allclose(outputs["sum"].sum(), expected.sum(), rtol=1e-5, atol=1e-5)


def test_a_constraint_on_the_examples_holds_as_far_as_it_can():
    class Constrained(m.Tokens):
        def __call__(self, tokens):
            return jax.lax.with_sharding_constraint(super().__call__(tokens), P("data"))

    outputs = make_trainer(Constrained(rngs=nnx.Rngs(0))).predict(m.make_batch(1))
    tree_allclose(outputs["logits"], nnx.jit(m.Tokens(rngs=nnx.Rngs(0)))(m.make_batch(1)["tokens"]))


def test_a_model_that_must_cut_the_examples_is_told():
    class Cutting(m.Tokens):
        def __call__(self, tokens):
            return jax.shard_map(lambda x: x, in_specs=P("data"), out_specs=P("data"))(super().__call__(tokens))

    trainer = make_trainer(Cutting(rngs=nnx.Rngs(0)))
    with pytest.raises(BatchError, match=r"1 examples of the batch are left over by the 2 data-parallel devices"):
        trainer.predict(m.make_batch(1))


def test_a_batch_without_examples():
    empty = {"tokens": jnp.zeros((0, m.LENGTH), jnp.int32)}
    with pytest.raises(BatchError, match=r"the batch has no examples: \['tokens'\] int32\[0, 5\]"):
        make_trainer().predict(empty)


def test_rows_of_single_processes_must_be_equally_many(monkeypatch):
    trainer = make_trainer()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), m.make_batch(3))
    monkeypatch.setattr(BatchSharding, "is_across", property(lambda rows: True))
    with pytest.raises(BatchError, match=r"the 3 examples of a batch .* by the 2 data-parallel .* multiple of 2"):
        trainer.rows_read(shapes, "evaluate")
