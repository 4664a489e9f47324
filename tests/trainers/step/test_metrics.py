"""The metrics of a step equal those of plain JAX under `jax.jit`, for every kind of step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Logging, LossError, Memory, MeshOptions, Precision, Training
from tests.helpers import slow_but
from tests.trainers import models as m
from tests.trainers.model import test_sharding as sharded

SCHEDULE = optax.linear_schedule(0.5, 0.1, 4)
ALL = Logging(metrics=True, learning_rate=SCHEDULE, progress=False)
NAMES = ("learning_rate", "gradient_norm", "parameter_norm", "update_ratio")


def layers(tx=None, stages=2, **options):
    options = {"num_microbatches": 2, "logging": ALL, **options}
    return PipelineTrainer(m.Layers(), tx or optax.adamw(SCHEDULE), m.squared_error, num_stages=stages, **options)


@functools.cache
def expected():
    """NumPy's norms of the gradients of whole batches, by `jax.grad`, and of Optax's updates."""
    graph, params = nnx.split(m.Layers())
    tx, rows = optax.adamw(SCHEDULE), []
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda params: m.squared_error(nnx.merge(graph, params), batch))(params)
        return grads, *tx.update(grads, state, params)

    for number, batch in enumerate(BATCHES):
        grads, updates, state = step(params, state, batch)
        rows.append([SCHEDULE(number), size(grads), size(params), size(updates) / size(params)])
        params = optax.apply_updates(params, updates)
    return np.array(rows)


def size(tree):
    """NumPy's norm of all leaves."""
    return np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree)))


@functools.cache
def trained(name):
    trainer = layers(**STEPS[name])
    return trainer, [{metric: float(of) for metric, of in trainer.train_step(batch).items()} for batch in BATCHES]


def names_of(trainer):
    """The metrics of a step, which is traced, and not compiled."""
    microbatches = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), BATCHES[0])
    return set(jax.eval_shape(trainer.step_function(BATCHES[0]), trainer.state, microbatches)[1])


BATCHES = [m.make_xy(4, seed=seed) for seed in range(3)]
STEPS = {
    "plain jit": {"stages": 1},
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "zero bubble with data, average and dynamic scale": {
        "schedule": "zero_bubble",
        "mesh": {"data": 2},
        "training": Training(ema_decay=0.9, on_nonfinite="skip"),
        "precision": Precision(loss_scale="dynamic"),
    },
    "scale, optimizer on the host, remat": {
        "precision": Precision(loss_scale=1024.0),
        "memory": Memory(optimizer_state="pinned_host", remat="full"),
    },
}


@pytest.mark.parametrize("name", slow_but(STEPS, "1f1b", "gpipe", "zero bubble with data, average and dynamic scale"))
def test_equal_plain_jax(name):
    rows = np.array([[row[name] for name in NAMES] for row in trained(name)[1]])
    # The optimizer divides by the size of each gradient: its own rounding of 1e-7 grows with that.
    np.testing.assert_allclose(rows, expected(), rtol=1e-4)


def test_the_schedule_does_not_change_the_norms():
    """The sums have one order: equal to the bit."""
    assert trained("1f1b")[1] == trained("gpipe")[1]


def check_norms(trainer, loss, batch, trained=nnx.Param):
    """Compare the norms of a step with those of its gradients by `jax.grad`, its parameters and its update."""
    graph, params, rest = nnx.split(trainer.gather_model(), trained, ...)
    grads = jax.jit(jax.grad(lambda params: loss(nnx.merge(graph, params, rest), batch)))(params)
    metrics = trainer.train_step(batch)
    update = jax.tree.map(jnp.subtract, nnx.state(trainer.gather_model(), trained), params)
    rows = [float(metrics[name]) for name in NAMES[1:]]
    np.testing.assert_allclose(rows, [size(grads), size(params), size(update) / size(params)], rtol=1e-4)


def test_only_trained_parameters_count_with_weights():
    def weighted(model, batch):
        return (jnp.square(model(batch["x"]) - batch["y"]).sum(-1) * batch["w"]).sum(), batch["w"].sum()

    def mean(model, batch):
        return jnp.divide(*weighted(model, batch))

    batch = BATCHES[0] | {"w": np.array([1, 2, 0, 4], np.float32)}
    options = {"num_stages": 2, "num_microbatches": 2, "logging": ALL, "training": Training(frozen=["layers/0/*"])}
    trainer = PipelineTrainer(m.Layers(), optax.sgd(0.1), weighted, **options)
    check_norms(trainer, mean, batch, lambda path, _: path[:2] == ("layers", 1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "microbatch"])
def test_sharded_parameters(how):
    logging, mesh = Logging(metrics=NAMES[1:], progress=False), MeshOptions(axes={"fsdp": 2}, fsdp=how)
    check_norms(sharded.trainer("nnx", mesh=mesh, logging=logging), m.squared_error, sharded.batch())


def test_a_skipped_step_has_no_update():
    trainer, _ = trained("zero bubble with data, average and dynamic scale")
    metrics = trainer.train_step({**BATCHES[1], "x": np.full_like(BATCHES[0]["x"], np.inf)})
    assert not np.isfinite(metrics["gradient_norm"])
    assert (float(metrics["skipped_step"]), float(metrics["update_ratio"])) == (1.0, 0.0)
    assert np.isfinite(metrics["parameter_norm"])
    np.testing.assert_allclose(metrics["learning_rate"], SCHEDULE(3), rtol=1e-6)


def test_nothing_is_computed_that_nobody_asked_for():
    given = Logging(metrics=["learning_rate"], learning_rate=SCHEDULE, progress=False)
    trainer = layers(optax.identity(), stages=1, logging=given)
    rows = [trainer.train_step(batch) for batch in BATCHES]
    assert set(rows[0]) == {"loss", "learning_rate"}
    np.testing.assert_allclose([float(row["learning_rate"]) for row in rows], [0.5, 0.4, 0.3], rtol=1e-6)


def test_a_learning_rate_that_is_not_known_is_left_out_and_a_line_says_so(capsys):
    def names(metrics, **options):
        trainer = layers(optax.adafactor(1e-3), stages=1, logging=Logging(metrics=metrics, **options))
        return names_of(trainer), capsys.readouterr().out

    found, text = names(True)
    assert "learning_rate" not in found
    assert "gradient_norm" in found
    assert text.count('the metric "learning_rate" is left out: ') == 1
    assert "Logging(learning_rate=)" in text
    found, text = names(["learning_rate", "gradient_norm"], learning_rate=1e-3)
    assert "learning_rate" in found
    assert "left out" not in text


def test_a_metric_of_the_loss_with_the_same_name_is_refused():
    def loss(model, batch):
        return m.squared_error(model, batch), {"gradient_norm": jnp.float32(0)}

    options = {"num_stages": 1, "num_microbatches": 2}
    with pytest.raises(LossError, match=r"'gradient_norm', but .* has a metric of this name. Rename"):
        PipelineTrainer(m.Layers(), optax.sgd(0.1), loss, logging=ALL, **options).train_step(BATCHES[0])
    plain = PipelineTrainer(m.Layers(), optax.sgd(0.1), loss, logging=False, **options)
    assert names_of(plain) == {"loss", "gradient_norm"}


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("loss", TypeError, "metrics='loss': it must be True, or a tuple of names: learning_rate, "),
        (("norm",), ValueError, "'norm' is not one of learning_rate, gradient_norm,"),
    ],
)
def test_names_that_do_not_exist(given, error, text):
    with pytest.raises(error, match=text):
        Logging(metrics=given)
