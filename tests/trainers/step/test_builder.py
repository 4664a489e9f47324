"""The step under plain `jax.jit`, one stage: the loss rule, mutable state, random numbers, and their independence."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Training
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

DOCS = Path(__file__).parents[3] / "docs"
BATCH_NORM = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")


TX, NO_UPDATES = optax.sgd(0.1, momentum=0.9), optax.sgd(0.0)


@sharing_steps()
def plain_trainer(loss_fn=m.mean_loss, model=None, num_microbatches=2, tx=TX, **options):
    model = model if model is not None else m.Model(2, rngs=nnx.Rngs(0))
    return PipelineTrainer(
        model, tx, loss_fn, num_stages=1, num_microbatches=num_microbatches, logging=False, **options
    )


def linen_trainer(loss_fn=m.mean_loss, module=None, **options):
    module = module or m.LinenModel(2)
    variables = module.init(jax.random.key(0), m.make_batch(2)["tokens"])
    return plain_trainer(loss_fn, module, variables=variables, **options)


def test_equals_gradient_accumulation():
    batches = [m.make_batch(8, seed) for seed in range(5)]
    losses, params = m.plain_training(m.Model(2, rngs=nnx.Rngs(0), marked=False), TX, m.mean_loss, batches, 2)
    trainer = plain_trainer()
    mine = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    tree_allclose(nnx.to_pure_dict(nnx.state(trainer.gather_model())), nnx.to_pure_dict(params[-1]))


def test_multi_steps_of_optax_are_microbatches_of_the_joined_batch():
    """What the pages tell users of `optax.MultiSteps`; on the same small batches the two differ."""
    batches = [m.make_xy(4, seed=seed) for seed in range(4)]
    accumulating = optax.MultiSteps(TX, 4).gradient_transformation()
    _, params = m.plain_training(m.Layers(), accumulating, m.squared_error, batches, 1)
    joined, same = (plain_trainer(m.squared_error, m.Layers(), num_microbatches=4) for _ in range(2))
    joined.train_step(jax.tree.map(lambda *parts: np.concatenate(parts), *batches))
    for batch in batches:
        same.train_step(batch)
    tree_allclose(jax.tree.leaves(joined.state.params), jax.tree.leaves(params[-1]))
    with pytest.raises(AssertionError):
        tree_allclose(jax.tree.leaves(same.state.params), jax.tree.leaves(params[-1]), rtol=0.1)
    for page in ("start/own_model.md", "coming_from/plain_flax.md"):
        (row,) = re.findall(r".*MultiSteps.*", (DOCS / page).read_text())
        assert "joined into one" in row


@pytest.mark.parametrize("make", [plain_trainer, slow(linen_trainer)])
def test_weights_make_the_loss_that_of_the_whole_batch(make):
    batch = m.make_batch(8)
    whole, parts = make(m.weighted_loss, num_microbatches=1), make(m.weighted_loss)
    first, second = whole.train_step(batch), parts.train_step(batch)
    assert float(second["weight"]) == batch["mask"].sum()
    np.testing.assert_allclose(float(first["loss"]), float(second["loss"]), rtol=1e-5)
    tree_allclose(jax.tree.leaves(parts.state.params), jax.tree.leaves(whole.state.params))


def test_a_batch_without_weight_changes_nothing():
    trainer = plain_trainer(m.weighted_loss)
    batch = {**m.make_batch(8), "mask": np.zeros((8, m.LENGTH), np.float32)}
    before = jax.tree.leaves(nnx.state(trainer.gather_model()))
    assert float(trainer.train_step(batch)["loss"]) == 0.0
    tree_allclose(jax.tree.leaves(nnx.state(trainer.gather_model())), before, rtol=0, atol=0)


def test_metrics_are_those_of_the_whole_batch():
    batch = m.make_batch(8)
    one, two = (plain_trainer(m.loss_with_metrics, num_microbatches=n).train_step(batch) for n in (1, 2))
    assert set(one) == {"loss", "accuracy", "masked_accuracy"}
    tree_allclose(two, one)


@BATCH_NORM
def test_only_written_state_is_carried():
    model = m.Model(2, rngs=nnx.Rngs(0), batch_norm=True, dropout=0.1)
    trainer = plain_trainer(model=model)
    trainer.step_function(m.make_batch(8))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(trainer.state.model_state)]
    (builder,) = trainer._core.builders._traced.values()
    carried = {jax.tree_util.keystr(paths[i]) for i in builder.carried}
    assert {path.split("'")[-2] for path in carried} == {"mean", "var"}
    assert len(carried) == 4


@BATCH_NORM
def test_running_statistics_go_from_microbatch_to_microbatch():
    batch = m.make_batch(8)
    trainer = plain_trainer(model=m.Model(2, rngs=nnx.Rngs(0), batch_norm=True))
    trainer.train_step(batch)
    reference = m.Model(2, rngs=nnx.Rngs(0), batch_norm=True)
    for i in range(2):
        reference(batch["tokens"][4 * i : 4 * i + 4])
    tree_allclose(
        nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.BatchStat)),
        nnx.to_pure_dict(nnx.state(reference, nnx.BatchStat)),
    )


@BATCH_NORM
def test_linen_batch_stats_and_dropout():
    def loss(model, batch):
        logits = model(batch["tokens"], training=model.training)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    module = m.LinenModel(2, dropout=0.2, batch_norm=True)
    batch = m.make_batch(8)
    trainer = linen_trainer(loss, module, tx=NO_UPDATES)
    before = trainer.gather_variables()["batch_stats"]
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(2)]
    assert losses[0] != losses[1]  # other masks at each step
    after = trainer.gather_variables()["batch_stats"]
    assert not np.allclose(jax.tree.leaves(before)[0], jax.tree.leaves(after)[0])
    evaluated = [trainer.evaluate([batch])["loss"] for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    logits = module.apply(trainer.gather_variables(), batch["tokens"], training=False)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    np.testing.assert_allclose(evaluated[0], expected, rtol=1e-5)


def test_dropout_differs_between_steps_and_microbatches_and_repeats_in_a_new_run():
    def per_example(model, batch):
        loss = m.mean_loss(model, batch)
        return loss, {"square": loss**2}

    def run():
        trainer = plain_trainer(per_example, model=m.Model(1, rngs=nnx.Rngs(0), dropout=0.5), tx=NO_UPDATES)
        batch = {k: np.repeat(v[:1], 4, 0) for k, v in m.make_batch(4).items()}
        return [tuple(map(float, trainer.train_step(batch).values())) for _ in range(3)]

    first = run()
    assert len(set(first)) == 3
    assert run() == first
    assert all(square > loss**2 * 1.0001 for loss, square in first), "the microbatches differ"


@BATCH_NORM
def test_the_users_model_is_left_alone():
    model = m.Model(2, rngs=nnx.Rngs(0), batch_norm=True)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    trainer = plain_trainer(model=model)
    taken = trainer.gather_model()
    for _ in range(3):
        trainer.train_step(m.make_batch(8))
    tree_allclose(jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model))), before, rtol=0, atol=0)
    assert jnp.isfinite(taken(m.make_batch(2)["tokens"])).all()  # not deleted by later steps
    between = trainer.gather_model()
    trainer.train_step(m.make_batch(8))
    assert jnp.isfinite(between(m.make_batch(2)["tokens"])).all()


def test_only_the_variables_asked_for_are_trained():
    model = m.Model(2, rngs=nnx.Rngs(0))
    head = lambda path, value: isinstance(value, nnx.Param) and "head" in path  # noqa: E731
    trainer = plain_trainer(model=model, training=Training(wrt=head))
    trainer.train_step(m.make_batch(8))
    after = trainer.gather_model()
    tree_allclose(np.asarray(after.embed.embedding), np.asarray(model.embed.embedding), rtol=0, atol=0)
    assert not np.allclose(np.asarray(after.head.kernel), np.asarray(model.head.kernel))
    assert len(jax.tree.leaves(trainer.state.params)) == 2
    assert [builder.carried for builder in trainer._core.builders._traced.values()] == [()]


def test_sown_values_are_no_obstacle_and_a_loss_in_bfloat16_is_summed_in_float32():
    def loss(model, batch):
        model.extra = nnx.Variable(jnp.zeros(3))
        return m.mean_loss(model, batch).astype(jnp.bfloat16)

    found = plain_trainer(loss).train_step(m.make_batch(8))["loss"]
    assert (found.dtype, bool(jnp.isfinite(found))) == (jnp.float32, True)
