"""Every way in which a loss's call can change a model: as in plain Flax on the whole batch, or refused by path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer, mark_stage_end
from jaxpp_flax.trainers import Training
from jaxpp_flax.trainers.errors import ModelError
from tests.helpers import slow, slow_but, tree_allclose
from tests.trainers.writes.plain_linen import plain_linen_step

WIDTH = 4
BATCHES = list(np.random.default_rng(0).normal(size=(3, 8, WIDTH)).astype(np.float32))


def at_most(kernel: jax.Array, norm: float = 0.5) -> jax.Array:
    return kernel * jnp.minimum(1, norm / jnp.linalg.norm(kernel, axis=0))


class MaxNorm(nnx.Linear):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.kernel[...] = at_most(self.kernel[...])
        return super().__call__(x)


class Averaged(nnx.Module):
    """A moving average of a trained kernel, and a number for its decay that each call moves."""

    def __init__(self, rngs: nnx.Rngs, kind: Any = nnx.Variable):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.average, self.decay = kind(jnp.zeros((WIDTH, WIDTH))), nnx.Variable(0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.average[...] = self.decay[...] * self.average[...] + self.dense.kernel[...]
        self.decay[...] = (1 + self.decay[...]) / 2
        return self.dense(x) + jax.lax.stop_gradient(x @ self.average[...])


class Counting(nnx.Linear):
    """A sum over examples, in a variable, in an array that is an attribute, and in one that was made in the call."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.total, self.attribute = nnx.BatchStat(jnp.zeros(WIDTH)), jnp.zeros(())

    def __call__(self, x: jax.Array) -> jax.Array:
        self.total[...] += jax.lax.stop_gradient(x.sum(0))
        self.attribute = self.attribute + 0 * jax.lax.stop_gradient(x.sum())
        return super().__call__(x)


class Sowing(nnx.Linear):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "inputs", x)
        return super().__call__(x)


class Under(nnx.Module):
    """A layer that writes its kernel under a transformation."""

    def __init__(self, transform: Callable[..., Any], rngs: nnx.Rngs):
        self.transform, self.layer = transform, MaxNorm(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.transform(lambda layer, x: layer(x))(self.layer, x)


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: MaxNorm(WIDTH, WIDTH, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = make(rngs.split(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class DataNorm(nnx.Linear):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.kernel[...] = self.kernel[...] / (1 + jax.lax.stop_gradient(jnp.abs(x).mean()))
        return super().__call__(x)


def dense(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)


MODULES: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "max_norm": lambda rngs: MaxNorm(WIDTH, WIDTH, rngs=rngs),
    "weight_norm": lambda rngs: nnx.WeightNorm(dense(rngs), rngs=rngs),
    "spectral_norm": lambda rngs: nnx.SpectralNorm(dense(rngs), rngs=rngs),
    "average": Averaged,
    "average_in_a_trained_parameter": lambda rngs: Averaged(rngs, nnx.Param),
    "average_in_a_statistic": lambda rngs: Averaged(rngs, nnx.BatchStat),
    "sums": lambda rngs: Counting(WIDTH, WIDTH, rngs=rngs),
    "sown": lambda rngs: Sowing(WIDTH, WIDTH, rngs=rngs),
    "jit": lambda rngs: Under(nnx.jit, rngs),
    "remat": lambda rngs: Under(nnx.remat, rngs),
    "scan": Scanned,
}
SEVERAL = pytest.mark.filterwarnings("ignore:.*BatchNorm normalizes", "ignore:Using 'Module.sow:DeprecationWarning")


def model_of(make: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    return nnx.Sequential(*[PipelineStage(make(nnx.Rngs(i))) for i in range(2)])


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def plain(model: nnx.Module, tx: Any, wrt: Any = nnx.Param) -> Any:
    """Train with `nnx.jit` on whole batches."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x))

    for x in BATCHES:
        step(model, optimizer, x)
    nnx.pop(model, nnx.Intermediate)
    return nnx.state(model)


def trained(
    model: Any, num_microbatches: int, num_stages: int = 2, tx: Any = None, loss: Any = loss_fn, **options: Any
) -> PipelineTrainer:
    trainer = PipelineTrainer(
        model, tx or optax.adamw(0.05), loss, num_stages=num_stages, num_microbatches=num_microbatches, logging=False,
        **options,
    )  # fmt: skip
    for x in BATCHES:
        trainer.train_step(x)
    return trainer


@SEVERAL
@pytest.mark.parametrize("num_microbatches", [slow(1), 4])
@pytest.mark.parametrize("kind", MODULES)
def test_equal_to_plain_flax_on_the_whole_batch(kind: str, num_microbatches: int):
    trainer = trained(model_of(MODULES[kind]), num_microbatches)
    expected = plain(model_of(MODULES[kind]), optax.adamw(0.05))
    tree_allclose(nnx.state(trainer.gather_model()), expected, atol=1e-6)


@pytest.mark.parametrize("options", slow_but([{"num_stages": 1}, {"mesh": {"data": 2}}], {"mesh": {"data": 2}}))
def test_on_other_devices(options: Any):
    trainer = trained(model_of(MODULES["weight_norm"]), 4, **options)
    tree_allclose(
        nnx.state(trainer.gather_model()), plain(model_of(MODULES["weight_norm"]), optax.adamw(0.05)), atol=1e-6
    )


def test_a_frozen_parameter_that_the_call_writes():
    def make() -> Any:
        return nnx.Sequential(PipelineStage(MODULES["max_norm"](nnx.Rngs(0))), PipelineStage(dense(nnx.Rngs(1))))

    def shrinking(model: Any, x: jax.Array) -> jax.Array:
        model.layers[0].kernel[...] *= 0.9
        return loss_fn(model, x)

    last = nnx.All(nnx.Param, nnx.PathContains(1))
    model, optimizer = make(), None
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=last)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(shrinking, argnums=nnx.DiffState(0, last))(model, x))

    for x in BATCHES:
        step(model, optimizer, x)
    trainer = trained(make(), 4, tx=optax.sgd(0.1), loss=shrinking, training=Training(wrt=last))
    tree_allclose(nnx.state(trainer.gather_model()), nnx.state(model), atol=1e-6)


def test_a_value_of_the_microbatch_is_that_of_plain_flax_or_refused():
    def make() -> nnx.Module:
        return model_of(lambda rngs: DataNorm(WIDTH, WIDTH, rngs=rngs))

    tree_allclose(nnx.state(trained(make(), 1).gather_model()), plain(make(), optax.adamw(0.05)), atol=1e-6)
    with pytest.raises(ModelError, match=r"layers/0/kernel, layers/1/kernel, and the value depends on the microbatch"):
        trained(make(), 4)


def test_a_skipped_step_writes_nothing():
    model = model_of(MODULES["max_norm"])
    trainer = trained(model, 2, tx=optax.sgd(0.1), training=Training(on_nonfinite="skip"))
    before = jax.device_get(trainer.state.params)
    assert trainer.train_step(np.full((8, WIDTH), np.nan, np.float32))["skipped_step"] == 1
    tree_allclose(trainer.state.params, before, rtol=0, atol=0)


def test_a_rounded_copy_is_refused():
    with pytest.raises(ModelError, match=r"writes the trained parameter layers/0/kernel.*with precision="):
        trained(model_of(MODULES["max_norm"]), 4, precision="bfloat16")


def looks_at_a_value(model: Any, x: jax.Array) -> jax.Array:
    model.layers[0].last = nnx.Variable(x)
    model.layers[1].shown = x.sum()
    model.layers[1].has_run = True
    model.train()
    return loss_fn(model, x)


def test_what_is_kept_and_never_read_is_dropped():
    """Also modes that the loss sets: they are no state."""

    def make() -> Any:
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        dropout.eval()
        return nnx.Sequential(PipelineStage(dense(nnx.Rngs(0))), PipelineStage(dense(nnx.Rngs(1))), dropout)

    trainer = trained(make(), 2, loss=looks_at_a_value)
    assert not hasattr(trainer.gather_model().layers[0], "last")


def makes_its_state(model: Any, x: jax.Array) -> jax.Array:
    first = model.layers[0]
    if hasattr(first, "mean"):
        x = x - first.mean[...]
    else:
        first.mean = nnx.Variable(x.mean(0))
    return loss_fn(model, x)


def makes_a_parameter(model: Any, x: jax.Array) -> jax.Array:
    first = model.layers[0]
    if not hasattr(first, "gain"):
        first.gain = nnx.Param(jnp.ones(WIDTH))
    return loss_fn(model, x * first.gain[...])


def counts_in_an_attribute(model: Any, x: jax.Array) -> jax.Array:
    model.layers[0].calls = getattr(model.layers[0], "calls", 0) + 1
    return loss_fn(model, x)


def begins_by_a_flag(model: Any, x: jax.Array) -> jax.Array:
    scale = 1.0 if getattr(model.layers[1], "begun", False) else 2.0
    model.layers[1].begun = True
    return scale * loss_fn(model, x)


def removes_a_variable(model: Any, x: jax.Array) -> jax.Array:
    loss = loss_fn(model, x)
    model.layers[0].bias = None
    return loss


def makes_another_type(model: Any, x: jax.Array) -> jax.Array:
    model.layers[0].bias = nnx.Variable(model.layers[0].bias[...])
    return loss_fn(model, x)


def writes_another_dtype(model: Any, x: jax.Array) -> jax.Array:
    loss = loss_fn(model, x)
    model.layers[0].bias.set_value(model.layers[0].bias[...].astype(jnp.bfloat16))
    return loss


def lengthens_a_tree(model: Any, x: jax.Array) -> jax.Array:
    model.layers[0].history.set_value((*model.layers[0].history.get_value(), x.sum()))
    return loss_fn(model, x)


def writes_another_shape(model: Any, x: jax.Array) -> jax.Array:
    loss = loss_fn(model, x)
    model.layers[1].bias.set_value(jnp.zeros((2, WIDTH)))
    return loss


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (makes_its_state, "makes layers/0/mean, which the model does not have before"),
        (makes_a_parameter, "makes layers/0/gain, which the model does not have before"),
        (counts_in_an_attribute, "changes the attribute layers/0/calls from None to 1"),
        (begins_by_a_flag, "changes the attribute layers/1/begun from None to True"),
        (removes_a_variable, "removes layers/0/bias from the model"),
        (makes_another_type, "makes the Param layers/0/bias a Variable"),
        (writes_another_dtype, "writes bfloat16[4] into layers/0/bias, which is float32[4]"),
        (writes_another_shape, "writes float32[2, 4] into layers/1/bias, which is float32[4]"),
    ],
)
def test_what_a_step_cannot_keep_is_refused_by_path_before_the_first_step(loss: Any, text: str):
    with pytest.raises(ModelError, match=re.escape(text)):
        trained(model_of(dense), 2, num_stages=1, loss=loss)


def test_a_tree_in_a_variable_keeps_its_leaves():
    model = model_of(dense)
    model.layers[0].history = nnx.Variable((jnp.zeros(()),))
    with pytest.raises(ModelError, match=r"changes the tree in a variable: layers/0/history/1 is new or missing"):
        trained(model, 2, num_stages=1, loss=lengthens_a_tree)


class LinenNorms(nn.Module):
    """Stock norms: one holds vectors of its power iteration in a collection."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = mark_stage_end(nn.WeightNorm(nn.Dense(WIDTH))(x))
        return nn.SpectralNorm(nn.Dense(WIDTH))(x, update_stats=True)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_linen_equal_to_plain_flax_on_the_whole_batch(num_microbatches: int):
    module, tx = LinenNorms(), optax.adamw(0.05)
    variables = module.init(jax.random.key(0), BATCHES[0])
    trainer = trained(module, num_microbatches, variables=variables)

    step, opt_state = plain_linen_step(module, tx, "batch_stats"), tx.init(variables["params"])
    for x in BATCHES:
        variables, opt_state = step(variables, opt_state, x)
    tree_allclose(trainer.gather_variables(), variables, atol=1e-6)


def test_parameters_that_a_linen_loss_writes():
    module = nn.Dense(WIDTH)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        model.variables["params"] = {**model.params, "kernel": at_most(model.params["kernel"])}
        return jnp.mean((model(x) - 1) ** 2)

    first = module.init(jax.random.key(0), BATCHES[0])
    trainer = PipelineTrainer(
        module, optax.sgd(0.0), loss, variables=first, num_stages=1, num_microbatches=2, logging=False
    )
    trainer.train_step(BATCHES[0])
    tree_allclose(trainer.gather_variables()["params"]["kernel"], at_most(first["params"]["kernel"]))


class Late(nn.Module):
    """A variable that the first call after `init` makes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        count = self.variable("state", "count", jnp.zeros, ())
        if not self.is_initializing():
            self.variable("state", "late", jnp.zeros, ()).value += x.sum()
        count.value += 1
        return nn.Dense(WIDTH)(x)


def test_a_linen_variable_that_a_call_makes_is_refused():
    variables = Late().init(jax.random.key(0), BATCHES[0])
    with pytest.raises(ModelError, match=re.escape("makes state/late, which the model does not have before")):
        trained(Late(), 2, num_stages=1, variables=variables)
