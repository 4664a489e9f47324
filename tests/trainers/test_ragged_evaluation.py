"""Evaluation of batches of several sizes: one program where examples count apart, and the exact mean in any case."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError
from tests.helpers import slow
from tests.trainers import models as m

SIZES = (8, 7, 1, 8, 5)
WHOLE = m.make_batch(sum(SIZES))
BATCHES = [
    jax.tree.map(lambda x, end=end, size=size: x[end - size : end], WHOLE)
    for end, size in zip(np.cumsum(SIZES), SIZES, strict=True)
]


def entropies(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])


def masked(model: Any, batch: Any) -> Any:
    losses = entropies(model, batch)
    return ((losses * batch["mask"]).sum(), batch["mask"].sum()), {"mean": losses.mean(), "places": losses.mean(0)}


def make_trainer(loss_fn: Any, num_stages: int = 2, num_microbatches: int = 2, data: int = 1) -> PipelineTrainer:
    return PipelineTrainer(
        m.Tokens(rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, num_stages=num_stages, num_microbatches=num_microbatches,
        mesh={"data": data}, logging=False,
    )  # fmt: skip


def programs(trainer: PipelineTrainer) -> int:
    return len(trainer.steps.compiled)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "data"), [(2, 4, 1), (2, 3, 2), (1, 1, 1), slow(1, 1, 2), slow(2, 1, 1)]
)
@pytest.mark.parametrize("arrays", [np.asarray, slow(jnp.asarray)])
def test_one_program_has_the_exact_mean(num_stages: int, num_microbatches: int, data: int, arrays: Any):
    trainer = make_trainer(masked, num_stages, num_microbatches, data)
    found = trainer.evaluate([jax.tree.map(arrays, batch) for batch in BATCHES])
    losses, mask = nnx.jit(entropies)(m.Tokens(rngs=nnx.Rngs(0)), WHOLE), WHOLE["mask"]
    np.testing.assert_allclose(found["loss"], (losses * mask).sum() / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(found["mean"], losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["places"], losses.mean(0), rtol=1e-5)
    assert programs(trainer) == 1
    trainer.evaluate(BATCHES)
    assert programs(trainer) == 1


def test_a_larger_batch_has_a_program_of_its_own():
    trainer = make_trainer(masked)
    found = trainer.evaluate(BATCHES[2:])
    losses = nnx.jit(entropies)(m.Tokens(rngs=nnx.Rngs(0)), WHOLE)[15:]
    np.testing.assert_allclose(found["mean"], losses.mean(), rtol=1e-5)
    assert programs(trainer) == 2


def test_another_length_has_a_program_of_its_own():
    trainer = make_trainer(lambda model, batch: entropies(model, batch).mean())
    shorter = {name: leaf[:, :3] for name, leaf in WHOLE.items()}
    found = trainer.evaluate([BATCHES[0], {name: leaf[:3] for name, leaf in shorter.items()}, BATCHES[4]])
    model = m.Tokens(rngs=nnx.Rngs(0))
    three = {name: leaf[:3] for name, leaf in shorter.items()}
    means = [nnx.jit(entropies)(model, batch).mean() for batch in (BATCHES[0], three, BATCHES[4])]
    np.testing.assert_allclose(found["loss"], np.dot(means, [8, 3, 5]) / 16, rtol=1e-5)
    assert programs(trainer) == 2


@pytest.mark.parametrize("how", ["masked mean", "perplexity", "count", "examples compared"])
def test_what_examples_share_is_never_computed_with_repeated_ones(how: str):
    """Each batch is computed as it is, and counts by its examples."""

    def loss_fn(model: Any, batch: Any) -> Any:
        losses = entropies(model, batch)
        if how == "masked mean":
            return (losses * batch["mask"]).sum() / batch["mask"].sum()
        if how == "examples compared":
            rows = model(batch["tokens"]).mean(1)
            return optax.softmax_cross_entropy_with_integer_labels(rows @ rows.T, jnp.arange(len(rows))).mean()
        metric = jnp.exp(losses.mean()) if how == "perplexity" else batch["mask"].sum()
        return losses.mean(), {"metric": metric}

    trainer, model = make_trainer(loss_fn, num_stages=1, num_microbatches=1), m.Tokens(rngs=nnx.Rngs(0))
    found = trainer.evaluate(BATCHES)
    rows = [jax.tree.leaves(nnx.jit(loss_fn)(model, batch)) for batch in BATCHES]
    expected = np.dot(SIZES, np.asarray(rows)) / sum(SIZES)
    np.testing.assert_allclose([found["loss"], *([found["metric"]] if "metric" in found else [])], expected, rtol=1e-5)


def test_several_sets_and_a_limit_of_batches():
    trainer = make_trainer(masked)
    found = trainer.evaluate({"first": BATCHES, "last": BATCHES[3:]}, steps=2)
    for name, batches in (("first", BATCHES[:2]), ("last", BATCHES[3:])):
        for metric, value in trainer.evaluate(batches).items():
            np.testing.assert_array_equal(found[f"{name}/{metric}"], value)
    assert {name.partition("/")[0] for name in found} == {"first", "last"}
    with pytest.raises(ValueError, match=r"evaluate got data\['b'\] \(a list\) without a single batch"):
        trainer.evaluate({"a": BATCHES, "b": []})
    with pytest.raises(ValueError, match="steps=0"):
        trainer.evaluate(BATCHES, steps=0)


def test_a_limit_draws_no_further_batch():
    def endless() -> Any:
        yield BATCHES[0]
        yield BATCHES[3]
        raise AssertionError("a batch too many")

    assert make_trainer(masked).evaluate(endless(), steps=2)["loss"] > 0


def test_a_batch_without_examples_is_refused_wherever_it_comes():
    trainer = make_trainer(masked)
    for batches in ([BATCHES[0], m.make_batch(0)], [m.make_batch(0)]):
        with pytest.raises(BatchError, match="the batch has no examples"):
            trainer.evaluate(batches)


def test_a_metric_of_each_example_is_refused_by_name():
    trainer = make_trainer(lambda model, batch: (entropies(model, batch).mean(), {"each": entropies(model, batch)}))
    with pytest.raises(ValueError, match=r"the metric 'each' has the shape \[7, 5\].*\[4, 5\] in another one"):
        trainer.evaluate(BATCHES[:2])
