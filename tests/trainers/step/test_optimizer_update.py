"""Optax's optimizers through the trainer: two stages train as one stage under plain `jax.jit` does."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import Precision
from tests.helpers import slow_but, tree_allclose
from tests.trainers.models import Layers, make_xy, squared_error

WIDTH = Layers.WIDTH


def batch(seed):
    return make_xy(4, seed=seed)


def to_numpy(leaf):
    leaf = leaf.as_jax_array() if isinstance(leaf, MpmdArray) else leaf
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def by_kind(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=1, decay_steps=3)


def plateau():
    return optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9))


def sam():
    return optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))


def optimizers_of_optax():
    """Every function of Optax that makes an optimizer of a learning rate, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            rates = {"learning_rate", "max_learning_rate"} & set(inspect.signature(function).parameters)
            if rates and not name.startswith(("scale_by", "_")):
                found[name] = functools.partial(function, 0.1)
    return found


LEFT_OUT = {"lbfgs", "sophia", "dpsgd", "optimistic_adam"}  # three are refused below, one is deprecated
BEGIN_SMALL = {"dadapt_adamw", "dog", "dowg", "fromage", "mechanize", "prodigy"}  # by their own estimate of a rate
OPTIMIZERS = optimizers_of_optax() | {
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, multiply_by_parameter_scale=False),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1.0)),
    "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, by_kind),
    "schedule": lambda: optax.sgd(SCHEDULE),
    "plateau": plateau,
    "multi_steps of plateau": lambda: optax.MultiSteps(plateau(), 2),
    "lbfgs without line search": lambda: optax.lbfgs(0.1, linesearch=None),
    "sam": sam,
    "clipping, then sam": lambda: optax.chain(optax.clip_by_global_norm(1.0), sam()),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "masked": lambda: optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda p: p.ndim == 2, params)),
}


def trained_plainly(tx, takes_value, steps):
    """Plain JAX, on whole batches."""
    graph, params = nnx.split(Layers())

    @jax.jit
    def step(params, state, data):
        loss, grads = jax.value_and_grad(lambda params: squared_error(nnx.merge(graph, params), data))(params)
        updates, state = tx.update(grads, state, params, **({"value": loss} if takes_value else {}))
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for seed in range(steps):
        params, state = step(params, state, batch(seed))
    return params, state


@pytest.mark.parametrize(
    "name", slow_but(sorted(OPTIMIZERS.keys() - LEFT_OUT), "multi_transform", "clipping, then sam")
)
def test_equals_plain(name):
    """All of Optax."""
    tx, takes_value = OPTIMIZERS[name](), any(of in name for of in ("plateau", "polyak", "momo"))
    made = PipelineTrainer(Layers(), tx, squared_error, num_stages=2, num_microbatches=2, logging=False)
    start = jax.tree.map(np.asarray, made.state.params)
    for seed in range(4):
        made.train_step(batch(seed))
    found = jax.tree.map(to_numpy, (made.state.params, made.state.opt_state))
    # Normalising optimizers divide by the size of a gradient or of a matrix: its own rounding of 1e-7 grows with that.
    tree_allclose(found, jax.tree.map(to_numpy, trained_plainly(tx, takes_value, 4)), rtol=1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), found[0], start)
    assert min(jax.tree.leaves(moved)) > (0 if name in BEGIN_SMALL else 1e-4), "every parameter is trained"


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
    "sam in opaque mode": (
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        r"(?s)grad_fn must be provided when opaque_mode.*optax\.contrib\.sam without opaque_mode",
    ),
    "dpsgd": (
        lambda: optax.chain(
            optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)), optax.sgd(0.1)
        ),
        r"the parameter layers/0/bias has shape \(\), but the parameter has \(4,\)\..*gradients of single examples",
    ),
    "lbfgs": (
        lambda: optax.lbfgs(),
        r"(?s)'grad' and 'value_fn'.*A step of a pipeline gives the optimizer the gradients",
    ),
    "sophia": (
        lambda: optax.contrib.sophia(1e-2),
        r"(?s)obj_fn.* such as optax\.adamw\(3e-4\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_more_than_a_step_has_are_refused(name):
    make, text = REFUSED[name]
    made = PipelineTrainer(Layers(), make(), squared_error, num_stages=2, num_microbatches=2, logging=False)
    with pytest.raises((TypeError, ValueError), match=text):
        made.compile(batch(0))
