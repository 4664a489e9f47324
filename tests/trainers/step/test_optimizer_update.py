"""Optax's optimizers through the trainer: two stages train as one stage under plain `jax.jit` does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Precision
from tests.helpers import slow_but, tree_allclose
from tests.trainers.models import Layers, make_xy, squared_error

WIDTH = Layers.WIDTH


def batch(seed):
    return make_xy(4, seed=seed)


def by_kind(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=1, decay_steps=3)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, multiply_by_parameter_scale=False),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1.0)),
    "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, by_kind),
    "schedule": lambda: optax.sgd(SCHEDULE),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9)),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "momo": lambda: optax.contrib.momo(0.1),
    "multi_steps of plateau": lambda: optax.MultiSteps(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9)), 2
    ),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
}


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "adamw", "multi_transform"))
def test_equals_plain(name):
    if name == "muon" and not hasattr(optax.contrib, "muon"):
        pytest.skip("this Optax has no muon")
    make = lambda stages: PipelineTrainer(  # noqa: E731
        Layers(), OPTIMIZERS[name](), squared_error, num_stages=stages, num_microbatches=2, logging=False
    )
    piped, plain = make(2), make(1)
    start = jax.tree.map(np.asarray, plain.state.params)
    for seed in range(3):
        for made in (piped, plain):
            made.train_step(batch(seed))
    state = [jax.tree.map(np.asarray, (made.state.params, made.state.opt_state)) for made in (piped, plain)]
    # Normalising optimizers divide by the size of a gradient or of a matrix: its own rounding of 1e-7 grows with that.
    tree_allclose(*state, rtol=1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state[0][0], start)
    assert min(jax.tree.leaves(moved)) > 1e-4, "every parameter is trained"


def scaled_by_loss():
    """Steps as long as the loss is large, which is kept."""

    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: -0.1 * value * g, updates), value

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)


def weighted_loss(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2 * batch["w"][:, None]), WIDTH * batch["w"].sum()


def test_the_value_is_the_loss_of_the_whole_batch():
    """Unequal weights of the microbatches, and a loss scale, are no part of it."""
    data = {**batch(0), "w": np.array([1, 2, 0, 4], np.float32)}
    graph, params = nnx.split(Layers())

    @jax.jit
    def plain(params):
        def mean(params):
            total, weight = weighted_loss(nnx.merge(graph, params), data)
            return total / weight

        value, grads = jax.value_and_grad(mean)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * value * g, params, grads)

    options = {"num_stages": 2, "num_microbatches": 2, "logging": False, "precision": Precision(loss_scale=8.0)}
    made = PipelineTrainer(Layers(), scaled_by_loss(), weighted_loss, **options)
    loss = made.train_step(data)["loss"]
    value, after = plain(params)
    np.testing.assert_allclose([float(loss), float(made.state.opt_state)], float(value), rtol=1e-6)
    tree_allclose(jax.tree.map(np.asarray, (made.state.params,)), jax.tree.map(np.asarray, (after,)), rtol=1e-5)


REFUSED = {
    "lbfgs": (lambda: optax.lbfgs(), r"its part `scale_by_zoom_linesearch` needs grad= and value_fn=, but a step has"),
    "sophia": (
        lambda: optax.contrib.sophia(1e-2),
        r"its part `hutchinson` needs obj_fn=.* such as optax\.adamw\(3e-4\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_compute_the_loss_again_are_refused(name):
    make, text = REFUSED[name]
    made = PipelineTrainer(Layers(), make(), squared_error, num_stages=2, num_microbatches=2, logging=False)
    with pytest.raises(TypeError, match=text):
        made.compile(batch(0))
