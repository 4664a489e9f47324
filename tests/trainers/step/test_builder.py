"""The step under plain `jax.jit`, one stage: the loss rule, mutable state, random numbers, and their independence."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Training
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

DOCS = Path(__file__).parents[3] / "docs"
BATCH_NORM = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
BATCH = m.make_xy(8) | {"w": np.arange(8, dtype=np.float32)}  # weights differ between the microbatches

TX, NO_UPDATES = optax.sgd(0.1, momentum=0.9), optax.sgd(0.0)


@sharing_steps()
def plain_trainer(loss_fn=m.squared_error, model=None, tx=TX, **options):
    model = model if model is not None else m.Layers()
    return PipelineTrainer(model, tx, loss_fn, num_stages=1, num_microbatches=2, logging=False, **options)


class Normed(m.Layers):
    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        self.norm = nnx.BatchNorm(self.WIDTH, rngs=nnx.Rngs(0), momentum=0.9)

    def __call__(self, x):
        return self.norm(super().__call__(x))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, training=True):
        x = nn.Dropout(0.2, deterministic=not training)(nn.Dense(m.Layers.WIDTH)(x))
        return nn.BatchNorm(use_running_average=not training, momentum=0.9)(x)


def weighted(model, batch):
    return (jnp.square(model(batch["x"]) - batch["y"]).sum(-1) * batch["w"]).sum(), batch["w"].sum()


def copied(model):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))


def test_equals_gradient_accumulation():
    batches = [m.make_xy(8, seed=seed) for seed in range(3)]
    losses, params = m.plain_training(m.Layers(), TX, m.squared_error, batches, 2)
    trainer = plain_trainer()
    mine = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    tree_allclose(nnx.to_pure_dict(nnx.state(trainer.gather_model())), nnx.to_pure_dict(params[-1]))


def test_multi_steps_of_optax_are_microbatches_of_the_joined_batch():
    """What the pages tell users of `optax.MultiSteps`."""
    batches = [m.make_xy(4, seed=seed) for seed in range(2)]
    accumulating = optax.MultiSteps(TX, 2).gradient_transformation()
    _, params = m.plain_training(m.Layers(), accumulating, m.squared_error, batches, 1)
    trainer = plain_trainer()
    trainer.train_step(jax.tree.map(lambda *parts: np.concatenate(parts), *batches))
    tree_allclose(jax.tree.leaves(trainer.state.params), jax.tree.leaves(params[-1]))
    for page in ("start/own_model.md", "coming_from/plain_flax.md"):
        (row,) = re.findall(r".*MultiSteps.*", (DOCS / page).read_text())
        assert "joined into one" in row


def test_weights_make_the_loss_that_of_the_whole_batch_and_a_batch_without_weight_changes_nothing():
    mean = lambda model, batch: jnp.divide(*weighted(model, batch))  # noqa: E731
    (loss,), (params,) = m.plain_training(m.Layers(), TX, mean, [BATCH], 1)
    trainer = plain_trainer(weighted)
    found = trainer.train_step(BATCH)
    assert float(found["weight"]) == BATCH["w"].sum()
    np.testing.assert_allclose(float(found["loss"]), loss, rtol=1e-5)
    tree_allclose(jax.tree.leaves(trainer.state.params), jax.tree.leaves(params))

    trainer, before = plain_trainer(weighted), copied(m.Layers())
    assert float(trainer.train_step({**BATCH, "w": np.zeros(8, np.float32)})["loss"]) == 0.0
    tree_allclose(copied(trainer.gather_model()), before, rtol=0, atol=0)


def test_metrics_are_those_of_the_whole_batch():
    def with_metrics(model, batch):
        errors = jnp.square(model(batch["x"]) - batch["y"]).mean(-1)
        weighted = (errors * batch["w"]).sum(), batch["w"].sum()
        return errors.mean(), {"bad": (errors > 1).mean(), "weighted": weighted}

    found = plain_trainer(with_metrics).train_step(BATCH)
    errors = np.square(np.asarray(nnx.jit(lambda model, x: model(x))(m.Layers(), BATCH["x"])) - BATCH["y"]).mean(-1)
    expected = {"loss": errors.mean(), "bad": (errors > 1).mean(), "weighted": np.average(errors, weights=BATCH["w"])}
    tree_allclose(found, jax.tree.map(np.float32, expected))


@BATCH_NORM
def test_only_written_state_is_carried():
    trainer = plain_trainer(model=Normed(dropout=0.1))
    trainer.step_function(BATCH)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(trainer.state.model_state)]
    (builder,) = trainer.steps.builders._traced.values()
    carried = sorted(jax.tree_util.keystr(paths[i]).split("'")[-2] for i in builder.writes.carried)
    assert carried == ["mean", "var"]


@BATCH_NORM
def test_running_statistics_go_from_microbatch_to_microbatch():
    trainer, reference = plain_trainer(model=Normed()), Normed()
    trainer.train_step(BATCH)
    run = nnx.jit(lambda model, x: model(x))
    for i in range(2):
        run(reference, BATCH["x"][4 * i : 4 * i + 4])
    tree_allclose(
        nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.BatchStat)),
        nnx.to_pure_dict(nnx.state(reference, nnx.BatchStat)),
    )


@BATCH_NORM
def test_the_users_model_is_left_alone():
    model = Normed()
    before = copied(model)
    trainer = plain_trainer(model=model)
    taken = trainer.gather_model()
    for _ in range(2):
        trainer.train_step(BATCH)
    between = trainer.gather_model()
    trainer.train_step(BATCH)
    tree_allclose(copied(model), before, rtol=0, atol=0)
    tree_allclose(copied(taken), before, rtol=0, atol=0)  # not deleted by later steps
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copied(between)))


@BATCH_NORM
def test_linen_batch_stats_and_dropout():
    def loss(model, batch):
        return jnp.mean((model(batch["x"], training=model.training) - batch["y"]) ** 2)

    module = LinenNormed()
    variables = jax.jit(module.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCH["x"])
    trainer = plain_trainer(loss, module, NO_UPDATES, variables=variables)
    losses = [float(trainer.train_step(BATCH)["loss"]) for _ in range(2)]
    assert losses[0] != losses[1]  # other masks at each step
    variables, before = trainer.gather_variables(), variables["batch_stats"]
    assert not np.allclose(jax.tree.leaves(before)[0], jax.tree.leaves(variables["batch_stats"])[0])
    evaluated = [trainer.evaluate([BATCH])["loss"] for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    found = jax.jit(lambda variables: module.apply(variables, BATCH["x"], training=False))(variables)
    np.testing.assert_allclose(evaluated[0], np.square(np.asarray(found) - BATCH["y"]).mean(), rtol=1e-5)


def test_dropout_differs_between_steps_and_microbatches_and_repeats_in_a_new_run():
    def with_square(model, batch):
        loss = m.squared_error(model, batch)
        return loss, {"square": loss**2}

    def run():
        trainer = plain_trainer(with_square, m.Layers(dropout=0.5), NO_UPDATES)
        batch = {name: np.repeat(leaf[:1], 4, 0) for name, leaf in m.make_xy(4).items()}
        return [tuple(map(float, trainer.train_step(batch).values())) for _ in range(3)]

    first = run()
    assert len(set(first)) == 3
    assert run() == first
    assert all(square > loss**2 * 1.0001 for loss, square in first), "the microbatches differ"


def test_only_the_variables_asked_for_are_trained():
    last = lambda path, value: isinstance(value, nnx.Param) and 1 in path  # noqa: E731
    trainer, before = plain_trainer(training=Training(wrt=last)), copied(m.Layers())
    trainer.train_step(BATCH)
    after = copied(trainer.gather_model())
    tree_allclose(after["layers"][0], before["layers"][0], rtol=0, atol=0)
    assert not np.allclose(after["layers"][1]["kernel"], before["layers"][1]["kernel"])
    assert len(jax.tree.leaves(trainer.state.params)) == 2
    assert [builder.writes.carried for builder in trainer.steps.builders._traced.values()] == [()]


def test_sown_values_are_no_obstacle_and_a_loss_in_bfloat16_is_summed_in_float32():
    def loss(model, batch):
        model.extra = nnx.Variable(jnp.zeros(3))
        return m.squared_error(model, batch).astype(jnp.bfloat16)

    found = plain_trainer(loss).train_step(BATCH)["loss"]
    assert (found.dtype, bool(np.isfinite(found))) == (jnp.float32, True)


def test_a_penalty_in_the_loss_leaves_each_kernel_with_its_stage():
    """As in Flax's ImageNet example; the norm of all kernels is a metric."""

    def with_penalty(model, batch):
        kernels = [leaf for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1]
        penalty = 0.01 * sum(jnp.sum(kernel**2) for kernel in kernels)
        return m.squared_error(model, batch) + penalty, {"norm": optax.tree.norm(kernels)}

    model = m.Layers(num_layers=3, width=16)
    batch = m.make_xy(8, 16)
    trainer = PipelineTrainer(model, TX, with_penalty, num_stages=3, num_microbatches=2, logging=False)
    expected, metrics = jax.jit(with_penalty, static_argnums=0)(model, batch)
    found = trainer.train_step(batch)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["norm"], metrics["norm"], rtol=1e-5)
    ranks = [leaf.mpmd_idxs for leaf in jax.tree.leaves(trainer.state.params)]
    assert ranks == [(0,), (0,), (1,), (1,), (2,), (2,)]
