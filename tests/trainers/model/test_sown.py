"""Models that sow, or perturb, train as in plain Flax, also if they were called before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import ModelError
from tests.trainers.models import Chain

pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Using 'Module:DeprecationWarning")
X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
LAST: dict[str, Any] = {"init_fn": lambda: 0.0, "reduce_fn": lambda _, value: value}
SUM: dict[str, Any] = {"init_fn": lambda: 0.0, "reduce_fn": lambda old, value: old + value}


class Balance(nnx.Variable):
    """The author's own type of what is sown."""


SOWN: dict[str, Callable[[Any, Any], Any]] = {
    "a tuple": lambda block, y: block.sow(nnx.Intermediate, "hidden", y),
    "an array": lambda block, y: block.sow(nnx.Intermediate, "hidden", y, **LAST),
    "an own type": lambda block, y: block.sow(Balance, "hidden", y.mean()),
    "an own type, summed": lambda block, y: block.sow(Balance, "hidden", y.mean(), **SUM),
    "a type by name": lambda block, y: block.sow("balance", "hidden", y),
    "a perturbation": lambda block, y: block.perturb("hidden", y),
}


class Block(nnx.Module):
    def __init__(self, sow: Callable[[Any, Any], Any], rngs: nnx.Rngs):
        self.linear, self.sow_value = nnx.Linear(4, 4, rngs=rngs), sow

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.sow_value(self, y)
        return jnp.tanh(y)


def made(sow: Callable[[Any, Any], Any], *, called: bool) -> Chain:
    model = Chain(PipelineStage(Block(sow, nnx.Rngs(i)), name=f"block_{i}") for i in range(2))
    if called:
        model(X)
    return model


def mean_loss(model: Any, x: Any) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def balanced_loss(model: Any, x: Any) -> jax.Array:
    loss = mean_loss(model, x)
    return loss + sum(jnp.mean(value) for value in jax.tree.leaves(nnx.pop(model, (nnx.Intermediate, Balance))))


def trainer_of(model: Any, loss: Any, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model, optax.sgd(0.1), loss, num_stages=2, num_microbatches=2, mesh={}, logging=False, **options
    )


def losses_of(trainer: PipelineTrainer) -> list[float]:
    return [float(trainer.train_step(X)["loss"]) for _ in range(2)]


def plain_losses(model: Any, loss: Any) -> list[float]:
    found, optimizer = [], nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        value, gradients = nnx.value_and_grad(loss)(model, X)
        optimizer.update(model, gradients)
        found.append(float(value))
    return found


# Each microbatch adds its mean to a sum that an earlier call has left, and a warning says so.
MOVED = pytest.mark.filterwarnings("ignore:the loss moves .*hidden:jaxpp_flax.trainers.MicrobatchStateWarning")


@MOVED
@pytest.mark.parametrize("kind", SOWN)
def test_an_nnx_model_that_was_called_before(kind: str):
    model = made(SOWN[kind], called=True)
    trainer = trainer_of(model, mean_loss)
    np.testing.assert_allclose(losses_of(trainer), plain_losses(made(SOWN[kind], called=True), mean_loss), rtol=1e-5)
    assert hasattr(model.blocks[0], "hidden")  # the user's module has its values still
    assert trainer.gather_model()(X).shape == X.shape
    trainer.set_weights(made(SOWN[kind], called=kind != "an own type"))


@pytest.mark.parametrize("kind", ["a tuple", "an own type", "an own type, summed"])
def test_a_balancing_loss_of_what_is_sown(kind: str):
    sow = SOWN[kind]
    trained = losses_of(trainer_of(made(sow, called=False), balanced_loss))
    np.testing.assert_allclose(trained, plain_losses(made(sow, called=False), balanced_loss), rtol=1e-5)
    with pytest.raises(
        ModelError, match=r"removes the variable blocks/0/hidden \(.*before you make.*nnx\.pop\(model, "
    ):
        trainer_of(made(sow, called=True), balanced_loss).train_step(X)


def test_captured_values():
    def loss(model: Any, x: Any) -> jax.Array:
        y, sown = nnx.capture(model, nnx.Intermediate)(x)
        return jnp.mean((y - 1) ** 2) + sum(jnp.mean(value) for value in jax.tree.leaves(sown))

    trained = losses_of(trainer_of(made(SOWN["a tuple"], called=True), loss))
    np.testing.assert_allclose(trained, plain_losses(made(SOWN["a tuple"], called=False), loss), rtol=1e-5)


def test_a_value_of_each_example_in_a_type_of_ones_own_is_refused():
    with pytest.raises(
        ModelError, match=r"writes float32\[2, 4\] into blocks/0/hidden, which is float32\[4, 4\].*nnx\.pop"
    ):
        trainer_of(made(lambda block, y: block.sow(Balance, "hidden", y, **LAST), called=True), mean_loss).train_step(X)


# ---------------------------------------------------------------------- Linen

LINEN: dict[str, Callable[[Any, Any], Any]] = {
    "a tuple": lambda block, y: block.sow("losses", "hidden", y),
    "a sum": lambda block, y: block.sow("losses", "hidden", y.mean(), **SUM),
    "an array": lambda block, y: block.sow("losses", "hidden", y, **LAST),
    "a perturbation": lambda block, y: block.perturb("hidden", y),
}


class LinenBlock(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(4)(x)
        LINEN[self.kind](self, y)
        return jnp.tanh(y)


class LinenModel(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = linen_pipeline.PipelineStage(LinenBlock(self.kind, name=f"block_{i}"))(x)
        return x


def balanced_linen_loss(model: Any, x: Any) -> jax.Array:
    y, written = model(x, mutable=["losses"])
    return jnp.mean((y - 1) ** 2) + sum(jnp.mean(value) for value in jax.tree.leaves(written))


def plain_linen_losses(module: nn.Module, variables: Any, loss: Any) -> list[float]:
    def loss_of(params: Any) -> jax.Array:
        return loss(lambda x, **options: module.apply({**variables, "params": params}, x, **options), X)

    found, params = [], variables["params"]
    for _ in range(2):
        value, gradients = jax.value_and_grad(loss_of)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        found.append(float(value))
    return found


@MOVED
@pytest.mark.parametrize("loss", [mean_loss, balanced_linen_loss])
@pytest.mark.parametrize("kind", LINEN)
def test_a_linen_model_with_the_variables_of_init(kind: str, loss: Any):
    module = LinenModel(kind)
    variables = module.init(jax.random.key(0), X)
    trainer = trainer_of(module, loss, variables=variables)
    if (kind, loss) == ("an array", mean_loss):  # nothing tells it from a state of each example
        with pytest.raises(
            ModelError, match=r"writes float32\[2, 4\] into losses/block_0/hidden, .*without this collection"
        ):
            trainer.train_step(X)
        return
    np.testing.assert_allclose(losses_of(trainer), plain_linen_losses(module, variables, loss), rtol=1e-5)
    assert sorted(trainer.gather_variables()) == (["params"] if kind == "a perturbation" else ["losses", "params"])
