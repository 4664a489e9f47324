"""What the loss is called with and what it does then: for each structure of a batch, in training and evaluation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer, mark_stage_end
from jaxpp_flax.trainers import BatchStatisticsWarning, Inference, ModelError, Training, UnusedParametersWarning
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

pytestmark = pytest.mark.usefixtures("verified")

WIDTH = m.Layers.WIDTH
PLAIN = m.make_xy(4)
MASKED = PLAIN | {"mask": np.array([1, 0, 1, 1], np.float32)}


def variables_of(module):
    return jax.jit(module.init, static_argnames="training")(jax.random.key(0), PLAIN["x"], training=False)


def make_trainer(model=None, loss_fn=m.squared_error, **options):
    options = {"num_stages": 1, "num_microbatches": 2, "logging": False, **options}
    if isinstance(model, nn.Module):
        options["variables"] = variables_of(model)
    model = model if model is not None else m.Layers()
    return PipelineTrainer(model, optax.sgd(0.1), loss_fn, **options)


# ------------------------------------------------------------------ an axis name that only another loop binds


class NnxNorm(nnx.Module):
    def __init__(self, axis_name=None):
        self.layers = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i))) for i in range(2)])
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.layers[1](self.norm(self.layers[0](x)))


class LinenNorm(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, training=True):
        x = nn.Dense(4, name="first")(x)
        x = mark_stage_end(x)
        x = nn.BatchNorm(use_running_average=not training, axis_name=self.axis_name, name="norm")(x)
        return nn.Dense(4, name="last")(x)


def normed_loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def averaged_loss(model, batch):
    return jax.lax.pmean(normed_loss(model, batch), "batch")


def norm_trainer(model, num_stages, loss_fn=normed_loss):
    return make_trainer(model, loss_fn, num_stages=num_stages), {"x": np.ones((8, WIDTH), np.float32)}


@pytest.mark.parametrize(("make", "num_stages"), [(NnxNorm, 1), (LinenNorm, 2), slow(NnxNorm, 2), slow(LinenNorm, 1)])
def test_an_axis_name_of_another_loop_is_refused_with_the_remedy(make, num_stages):
    for axis_name in ("batch", ("batch", "data")):
        trainer, batch = norm_trainer(make(axis_name=axis_name), num_stages)
        told = r"'normed_loss' uses the axis name 'batch'.*Remove axis_name="
        with pytest.raises(ModelError, match=told) as raised:
            trainer.train_step(batch)
        assert isinstance(raised.value.__cause__, NameError)
    plain, _ = norm_trainer(make(), num_stages)
    with pytest.warns(BatchStatisticsWarning):
        plain.train_step(batch)  # as the error says
    trainer, _ = norm_trainer(make(), num_stages, averaged_loss)
    with pytest.raises(ModelError, match=r"'averaged_loss' uses the axis name 'batch'.*or jax.lax.pmean"):
        trainer.train_step(batch)


def test_another_name_error_stays():
    trainer, batch = norm_trainer(NnxNorm(), 1, lambda model, batch: unknown_name)  # noqa: F821 pyright: ignore
    with pytest.raises(NameError, match="unknown_name"):
        trainer.train_step(batch)


# ------------------------------------------------------------------ one trace for each structure of a batch


COUNTED = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning")


class Counting(m.Layers):
    def __init__(self):
        super().__init__()
        self.masked = nnx.Variable(jnp.zeros(()))


def weighted_loss(model, batch):
    errors = jnp.square(model(batch["x"]) - batch["y"]).mean(-1)
    return (errors * batch["mask"]).sum(), batch["mask"].sum()


def counting_loss(model, batch):
    if "mask" not in batch:
        return m.squared_error(model, batch)
    model.masked[...] = model.masked[...] + 1
    return weighted_loss(model, batch)


@nnx.jit
def plain_loss(model, batch):
    return jnp.divide(*weighted_loss(model, {"mask": jnp.ones(len(batch["x"])), **batch}))


@COUNTED
def test_what_the_loss_writes_is_found_for_each_structure():
    trainer = make_trainer(Counting(), counting_loss, num_stages=2)
    for batch in (PLAIN, MASKED, PLAIN, MASKED):
        expected = plain_loss(trainer.gather_model(), batch)
        np.testing.assert_allclose(float(trainer.train_step(batch)["loss"]), expected, rtol=1e-5)
    assert float(trainer.gather_model().masked[...]) == 4.0, "two masked batches of two microbatches"


def test_what_the_loss_uses_is_found_for_each_structure():
    class TwoHeads(m.Layers):
        def __init__(self):
            super().__init__()
            self.other = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def loss(model, batch):
        extra = model.other(jnp.ones(WIDTH)).sum() if "mask" in batch else 0.0
        return m.squared_error(model, batch) + extra

    for order in ((MASKED, PLAIN), (PLAIN, MASKED)):
        trainer = make_trainer(TwoHeads(), loss)
        for batch in order:
            if "mask" in batch:
                assert trainer.step_function(batch) is not None
            else:
                with pytest.raises(UnusedParametersWarning, match=r"does not depend on .*other/\*"):
                    trainer.step_function(batch)


@COUNTED
def test_evaluation_traces_its_own_loss_alone():
    trainer = make_trainer(
        Counting(),
        lambda model, b: counting_loss(model, {"mask": b["mask"], **b}),
        inference=Inference(eval_loss_fn=m.squared_error),
    )
    np.testing.assert_allclose(trainer.evaluate([PLAIN])["loss"], plain_loss(m.Layers(), PLAIN), rtol=1e-5)
    expected = plain_loss(m.Layers(), MASKED)
    np.testing.assert_allclose(float(trainer.train_step(MASKED)["loss"]), expected, rtol=1e-5)
    assert float(trainer.gather_model().masked[...]) == 2.0


# ------------------------------------------------------------------ training and random numbers by name


class Switched(m.Layers):
    """Is told by its arguments whether it trains, and with which random numbers."""

    def __call__(self, x, training=True, rngs=None):
        for layer in self.layers:
            x = x + nnx.Dropout(0.5)(jnp.tanh(layer(x)), deterministic=not training, rngs=rngs)
        return x


def switched_loss(model, batch, *, training, rngs):
    return jnp.mean((model(batch["x"], training=training, rngs=rngs) - batch["y"]) ** 2)


@jax.jit
def plain_switched_loss(params, step, batch):
    """The loss of a step under plain JAX: the keys are those of its number and the microbatch's."""
    model, losses = nnx.merge(nnx.graphdef(Switched()), params), []
    for i in range(2):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 1), step), i)
        microbatch = {name: leaf[2 * i : 2 * i + 2] for name, leaf in batch.items()}
        losses.append(switched_loss(model, microbatch, training=True, rngs=nnx.Rngs(key)))
    return sum(losses) / 2


@pytest.mark.parametrize("stages", [slow(1), 2])
def test_an_nnx_loss_is_told_whether_it_trains_and_with_which_keys(stages):
    batch = {name: np.repeat(leaf[:1], 4, 0) for name, leaf in PLAIN.items()}
    trainer = make_trainer(Switched(), switched_loss, num_stages=stages, training=Training(seed=7))
    for step in range(2):
        expected = plain_switched_loss(nnx.state(trainer.gather_model()), step, batch)
        np.testing.assert_allclose(float(trainer.train_step(batch)["loss"]), expected, rtol=1e-5)
    found = np.asarray(nnx.jit(lambda model, x: model(x, training=False))(trainer.gather_model(), batch["x"]))
    np.testing.assert_allclose(trainer.evaluate([batch])["loss"], np.square(found - batch["y"]).mean(), rtol=1e-5)
    tree_allclose(trainer.predict(batch["x"]), found)


class SwitchedLinen(nn.Module):
    @nn.compact
    def __call__(self, x, training=True, rngs=None):
        x = nn.Dense(WIDTH)(x)
        return nn.Dropout(0.5, deterministic=not training)(x)


def test_a_linen_loss_is_given_the_same_by_name():
    def by_attribute(model, batch):
        return switched_loss(model, batch, training=model.training, rngs=None)

    made = [make_trainer(SwitchedLinen(), loss) for loss in (switched_loss, by_attribute)]
    assert len({float(trainer.train_step(PLAIN)["loss"]) for trainer in made}) == 1
    variables = made[1].gather_variables()
    found = np.asarray(jax.jit(lambda variables, x: SwitchedLinen().apply(variables, x, False))(variables, PLAIN["x"]))
    np.testing.assert_allclose(made[1].evaluate([PLAIN])["loss"], np.square(found - PLAIN["y"]).mean(), rtol=1e-5)
    tree_allclose(made[0].predict(PLAIN["x"]), found)


def test_functions_for_evaluation_and_prediction_are_told_too():
    told = []

    def loss(model, batch, training=True):
        told.append(training)
        return m.squared_error(model, batch)

    trainer = make_trainer(
        loss_fn=loss, inference=Inference(predict_fn=lambda model, x, training: told.append(training) or model(x))
    )
    trainer.evaluate([PLAIN])
    trainer.predict(PLAIN["x"])
    assert set(told) == {False}
    told.clear()
    trainer.step_function(PLAIN)
    assert set(told) == {True}


# ------------------------------------------------------------------ statistics of a batch


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_statistics_of_microbatches_are_warned_of_once(kind):
    make = lambda **options: make_trainer({"nnx": NnxNorm, "linen": LinenNorm}[kind](), loss, **options)  # noqa: E731

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    path = {"nnx": "norm/mean", "linen": "collections/batch_stats/norm/mean"}[kind]
    trainer = make()
    with pytest.warns(BatchStatisticsWarning, match=rf"\({path}\W.*In each of the 2 microb") as caught:
        trainer.step_function(PLAIN)
    assert len(caught) == 1
    trainer.step_function(MASKED)  # a warning is an error here
    make(num_microbatches=1).step_function(PLAIN)  # the whole batch has these statistics
