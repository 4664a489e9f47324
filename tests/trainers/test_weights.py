"""`trainer.set_weights`: weights in memory, checked by path, shape and dtype, whatever is frozen here or there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers import Memory, ModelError, Training
from tests.helpers import slow_but, tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

BATCH, TEST = m.make_xy(4), m.make_xy(4, seed=9)
MOMENTUM = optax.sgd(0.1, momentum=0.9)


@sharing_steps("seed", "model")
def make(seed: int = 0, stages: int = 2, tx: Any = MOMENTUM, model: Any = None, **options: Any) -> PipelineTrainer:
    options = {"num_microbatches": 2, "assignment": "even", "logging": False, **options}
    made = model or m.Layers(rngs=nnx.Rngs(seed))
    return PipelineTrainer(made, tx, m.squared_error, num_stages=stages, **options)


def weights(trainer: PipelineTrainer) -> Any:
    return {path: np.array(leaf) for path, leaf in flatten(nnx.state(trainer.gather_model(), nnx.Param))[0].items()}


FORMS: dict[str, Any] = {
    "module": lambda trainer: trainer.gather_model(),
    "arrays on ranks": lambda trainer: trainer.state.params,
    "state": lambda trainer: trainer.state,
    "numpy": lambda trainer: jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.gather_model()))),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_trainer(form: str):
    """Into trainers of other stages, made, placed and trained; the moments stay, and both trainers go on alone."""
    source = make(1)
    source.train_step(BATCH)
    wanted = weights(source)
    for target in (make(2), make(2, 1), make(2, model=lambda rngs: m.Layers(rngs=rngs))):
        for trained in (False, True):
            if trained:
                target.train_step(BATCH)
            before = jax.tree.map(np.array, target.state.opt_state) if trained else None
            given = FORMS[form](source)
            target.set_weights(given)
            tree_allclose(weights(target), wanted, rtol=0, atol=0)
            if trained:
                tree_allclose(jax.tree.map(np.array, target.state.opt_state), before, rtol=0, atol=0)
        assert np.isfinite(target.train_step(BATCH)["loss"])  # which donates its own arrays alone
        jax.tree.map(np.array, nnx.state(given) if isinstance(given, nnx.Module) else given)
        tree_allclose(weights(source), wanted, rtol=0, atol=0)


def test_the_model_of_an_explicit_mesh_is_an_ordinary_one():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    trainer, plain = make(mesh=mesh), make()
    for each in (trainer, plain):
        each.train_step(BATCH)
    tree_allclose(trainer.gather_model()(TEST["x"]), plain.gather_model()(TEST["x"]), rtol=1e-5, atol=1e-6)


def test_the_first_step_is_that_of_a_trainer_made_with_these_weights():
    model = m.Layers(rngs=nnx.Rngs(1))
    given, made = make(2, training=Training(ema_decay=0.5)), make(model=model, training=Training(ema_decay=0.5))
    given.set_weights(model)
    for trainer in (given, made):
        trainer.train_step(BATCH)
    found, wanted = (jax.tree.map(np.array, trainer.state) for trainer in (given, made))
    tree_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("options", slow_but([{}, {"stages": 1}, {"memory": "pinned_host"}], {}))
def test_copies_of_parameters_follow_them(options: dict[str, Any]):
    options = {"stages": 2, **options}
    memory = Memory(optimizer_state=options.pop("memory", None))
    tx = optax.contrib.schedule_free_sgd(0.1)
    source, target = make(1), make(2, tx=tx, training=Training(ema_decay=0.9), memory=memory, **options)
    target.train_step(BATCH)
    target.set_weights(source.gather_model())
    wanted = weights(source)
    for tree in (target.state.ema, target.state.opt_state.z):
        tree_allclose({path: np.array(leaf) for path, leaf in flatten(tree)[0].items()}, wanted, rtol=0, atol=0)
    target.train_step(BATCH)


def test_halves_that_alternate_need_no_files():
    """Each trainer freezes the other's half: their leaves have one path, whoever trains them."""

    def half(frozen: str) -> PipelineTrainer:
        return make(0, tx=optax.sgd(0.1), training=Training(frozen=[frozen]))

    first, second, plain = half("layers/1/*"), half("layers/0/*"), m.Layers()
    for seed in range(2):
        batch = m.make_xy(4, seed=seed)
        for trainer, other, i in ((first, second, 0), (second, first, 1)):
            trainer.train_step(batch)
            other.set_weights(trainer.state.params)  # the leaves that it has trained
            grads = nnx.grad(m.squared_error)(plain, batch)
            for name in ("kernel", "bias"):
                leaf = getattr(plain.layers[i], name)
                leaf[...] = leaf[...] - 0.1 * getattr(grads.layers[i], name)[...]
            expected = {path: np.array(leaf) for path, leaf in flatten(nnx.state(plain, nnx.Param))[0].items()}
            tree_allclose(weights(other), expected, rtol=1e-5)


def test_linen_with_frozen_parameters_and_statistics():
    tokens, batch = m.make_batch(4)["tokens"], m.make_batch(4)

    module = m.LinenModel(1, batch_norm=True)
    variables = [jax.jit(module.init)(jax.random.key(seed), tokens) for seed in range(2)]

    def linen(seed: int, **parameters: Any) -> PipelineTrainer:
        return PipelineTrainer(
            module, optax.sgd(0.1), m.mean_loss, variables=variables[seed], num_stages=2,
            num_microbatches=1, logging=False, training=Training(**parameters),
        )  # fmt: skip

    source, target = linen(0), linen(1, frozen=["Embed_0/*"])
    source.train_step(batch)
    wanted = jax.tree.map(np.array, source.gather_variables())
    for form in (source.gather_variables(), source.gather_model(), source.state):
        target = linen(1, frozen=["Embed_0/*"])
        target.set_weights(form)
        tree_allclose(jax.tree.map(np.array, target.gather_variables()), wanted, rtol=0, atol=0)
    target = linen(1, frozen=["Embed_0/*"])
    target.set_weights(source.gather_variables()["params"])
    tree_allclose(jax.tree.map(np.array, target.gather_variables()["params"]), wanted["params"], rtol=0, atol=0)


def test_the_given_arrays_may_change_afterwards():
    target, given = make(0), {"layers": {0: {"bias": np.ones(4, np.float32)}}}
    target.set_weights(given)
    given["layers"][0]["bias"][:] = 7.0
    target.train_step(BATCH)
    assert np.all(np.asarray(target.gather_model().layers[0].bias[...]) < 2)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    target = make(0)
    before = weights(target)
    bias = lambda value: {"layers": {0: {"bias": value}, 1: {"bias": np.full(4, 5.0, np.float32)}}}  # noqa: E731
    for given, text in (
        (bias(np.zeros(3, np.float32)), r"layers/0/bias: shape \(3,\), and the model has \(4,\)\."),
        (bias(jnp.zeros(4, jnp.bfloat16)), r"layers/0/bias: dtype bfloat16, and the model has float32\."),
        (
            {"layers": {7: {"bias": np.zeros(4)}}},
            r"layers/7/bias: the model has no such leaf\. The model's paths: .*layers/0/bias,",
        ),
        ({}, "a dict that does not fit, and nothing has changed. it has no weights"),
    ):
        with pytest.raises(ModelError, match=text):
            target.set_weights(given)
        tree_allclose(weights(target), before, rtol=0, atol=0)


def test_what_the_optimizer_computed_from_parameters_is_computed_anew():
    source = make(1)
    sized = make(0, tx=optax.GradientTransformation(lambda p: optax.tree.norm(p), lambda g, s, p=None: (g, s)))
    sized.train_step(BATCH)
    sized.set_weights(source.gather_model())
    wanted = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in weights(source).values()))
    np.testing.assert_allclose(np.asarray(sized.state.opt_state), wanted, rtol=1e-6)  # a sum in another order
