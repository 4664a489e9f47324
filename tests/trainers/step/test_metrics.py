"""The metrics of a step equal those of plain JAX under `jax.jit`, for every kind of step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.layers import add_lora
from jaxpp_flax.trainers import Logging, LossError, Memory, MeshOptions, Precision, Training
from tests.helpers import slow
from tests.trainers import models as m
from tests.trainers.model import test_sharding as sharded
from tests.trainers.test_matches_plain import make_trainer

SCHEDULE = optax.linear_schedule(0.5, 0.1, 4)
ALL = Logging(metrics=True, learning_rate=SCHEDULE, progress=False)
NAMES = ("learning_rate", "gradient_norm", "parameter_norm", "update_ratio")


def layers(tx=None, stages=2, **options):
    options = {"num_microbatches": 2, "logging": ALL, **options}
    return PipelineTrainer(m.Layers(), tx or optax.adamw(SCHEDULE), m.squared_error, num_stages=stages, **options)


def expected(batches):
    """NumPy's norms of the gradients of whole batches, by `jax.grad`, and of Optax's updates."""
    graph, params = nnx.split(m.Layers())
    tx, rows = optax.adamw(SCHEDULE), []
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda params: m.squared_error(nnx.merge(graph, params), batch))(params)
        return grads, *tx.update(grads, state, params)

    def size(tree):
        return group_norms([tree])[0]

    for number, batch in enumerate(batches):
        grads, updates, state = step(params, state, batch)
        rows.append([SCHEDULE(number), size(grads), size(params), size(updates) / size(params)])
        params = optax.apply_updates(params, updates)
    return np.array(rows)


def found(trainer, batches):
    return np.array([[float(metrics[name]) for name in NAMES] for metrics in map(trainer.train_step, batches)])


BATCHES = [m.make_xy(4, seed=seed) for seed in range(3)]
STEPS = {
    "plain jit": {"stages": 1},
    "1f1b": {},
    "zero bubble": {"schedule": "zero_bubble"},
    "data parallel": {"mesh": {"data": 2}},
    "moving average": {"training": Training(ema_decay=0.9)},
    "loss scale": {"precision": Precision(loss_scale=1024.0)},
    "dynamic loss scale": {"precision": Precision(loss_scale="dynamic")},
    "skip": {"training": Training(on_nonfinite="skip")},
    "optimizer on the host": {"memory": Memory(optimizer_state="pinned_host")},
    "remat": {"memory": Memory(remat="full")},
}


@pytest.mark.parametrize("name", STEPS)
def test_equal_plain_jax(name):
    trainer = layers(**STEPS[name])
    # The optimizer divides by the size of each gradient: its own rounding of 1e-7 grows with that.
    np.testing.assert_allclose(found(trainer, BATCHES), expected(BATCHES), rtol=1e-4)


def group_norms(trees):
    """NumPy's norm of each group of leaves."""
    leaves = [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in trees]
    return [np.sqrt(sum(np.sum(np.square(leaf)) for leaf in group)) for group in leaves]


@pytest.mark.parametrize("kind", ["nnx", slow("linen")])
def test_equal_one_stage_with_frozen_parameters_and_weights(kind):
    """Only trained parameters count."""
    options = {"loss_fn": m.weighted_loss, "logging": ALL, "num_blocks": 2, "tx": optax.sgd(0.1, momentum=0.9)}
    options["training"] = Training(frozen=["*mbed*"])
    plain, piped = (
        make_trainer(kind, "1f1b", 1, 1, 4, mesh=None, **options),
        make_trainer(kind, "1f1b", 2, 2, 4, **options),
    )
    trained = jax.tree.leaves(plain.state.params)
    (size,) = group_norms([trained])
    for seed in range(2):
        batch = m.make_batch(8, seed)
        one, two = plain.train_step(batch), piped.train_step(batch)
        np.testing.assert_allclose([one[name] for name in NAMES], [two[name] for name in NAMES], rtol=1e-5)
        if not seed:
            np.testing.assert_allclose(one["parameter_norm"], size, rtol=1e-5)


def test_adapters_alone_count():
    model = add_lora(m.Layers(), rank=2, alpha=4, layers="layers/*", rngs=nnx.Rngs(1))
    trainer = PipelineTrainer(
        model, optax.sgd(0.1), m.squared_error, num_stages=2, num_microbatches=2, logging=ALL,
        training=Training(wrt=nnx.LoRAParam),
    )  # fmt: skip
    size = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))))
    np.testing.assert_allclose(trainer.train_step(BATCHES[0])["parameter_norm"], size, rtol=1e-5)


@pytest.mark.parametrize("how", ["step", slow("microbatch")])
def test_sharded_parameters(how):
    options = {"logging": Logging(metrics=NAMES[1:], progress=False)}
    piped = sharded.trainer("nnx", mesh=MeshOptions(axes={"fsdp": 2}, fsdp=how), **options)
    plain = sharded.trainer("nnx", stages=1, **options)
    for _ in range(2):
        one, two = plain.train_step(sharded.batch()), piped.train_step(sharded.batch())
        np.testing.assert_allclose([one[name] for name in NAMES[1:]], [two[name] for name in NAMES[1:]], rtol=1e-5)


def test_a_skipped_step_has_no_update():
    trainer = layers(training=Training(on_nonfinite="skip"))
    trainer.train_step(BATCHES[0])  # a first loss that is not finite is an error
    metrics = trainer.train_step({**BATCHES[1], "x": np.full_like(BATCHES[0]["x"], np.inf)})
    assert not np.isfinite(metrics["gradient_norm"])
    assert (float(metrics["skipped_step"]), float(metrics["update_ratio"])) == (1.0, 0.0)
    assert np.isfinite(metrics["parameter_norm"])
    np.testing.assert_allclose(metrics["learning_rate"], SCHEDULE(1), rtol=1e-6)


def test_the_schedule_does_not_change_the_norms():
    """The sums have one order: equal to the bit."""
    rows = []
    for schedule in ("1f1b", "gpipe"):
        trainer = layers(schedule=schedule)
        rows.append([{name: float(of) for name, of in trainer.train_step(batch).items()} for batch in BATCHES])
    assert rows[0] == rows[1]


def test_nothing_is_computed_that_nobody_asked_for():
    assert set(layers(logging=False).train_step(BATCHES[0])) == {"loss"}
    asked = Logging(metrics=["gradient_norm"], progress=False)
    assert set(layers(optax.identity(), logging=asked).train_step(BATCHES[0])) == {"loss", "gradient_norm"}


@pytest.mark.parametrize("metrics", [True, ["learning_rate", "gradient_norm"]])
def test_a_learning_rate_that_is_not_known_is_left_out_and_a_line_says_so(metrics, capsys):
    def names(tx, **options):
        trainer = layers(tx, logging=Logging(metrics=metrics, **options))
        return set(trainer.train_step(BATCHES[0])), capsys.readouterr().out

    found, text = names(optax.adafactor(1e-3))
    assert "learning_rate" not in found
    assert "gradient_norm" in found
    assert text.count('the metric "learning_rate" is left out: ') == 1
    assert "Logging(learning_rate=)" in text
    for tx, options in (
        (optax.adafactor(1e-3), {"learning_rate": 1e-3}),
        (optax.inject_hyperparams(optax.adafactor, static_args="min_dim_size_to_factor")(learning_rate=1e-3), {}),
    ):
        found, text = names(tx, **options)
        assert "learning_rate" in found
        assert "left out" not in text


def test_a_given_learning_rate():
    given = Logging(metrics=["learning_rate"], learning_rate=SCHEDULE, progress=False)
    trainer = layers(optax.identity(), logging=given)
    rates = [float(trainer.train_step(batch)["learning_rate"]) for batch in BATCHES]
    np.testing.assert_allclose(rates, [0.5, 0.4, 0.3], rtol=1e-6)


def test_a_metric_of_the_loss_with_the_same_name_is_refused():
    def loss(model, batch):
        return m.squared_error(model, batch), {"gradient_norm": jnp.float32(0)}

    options = {"num_stages": 2, "num_microbatches": 2}
    with pytest.raises(LossError, match=r"'gradient_norm', and the step has its own of this name. Rename"):
        PipelineTrainer(m.Layers(), optax.sgd(0.1), loss, logging=ALL, **options).train_step(BATCHES[0])
    plain = PipelineTrainer(m.Layers(), optax.sgd(0.1), loss, logging=False, **options)
    assert float(plain.train_step(BATCHES[0])["gradient_norm"]) == 0


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
