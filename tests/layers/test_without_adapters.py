"""A model with its adapters off computes what it did before they were trained, and nothing of it is copied or kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.layers import add_lora, without_adapters
from jaxpp_flax.linen import PipelineStage as LinenStage
from jaxpp_flax.trainers import Training

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=rngs)) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.drop(x)


def adapted() -> Plain:
    model = add_lora(Plain(nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(1))
    return trained(model)


def trained(model: Any) -> Any:
    """Give all factors values, as training does."""
    for _, factor in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        factor[...] = jnp.full(factor.shape, 0.3)
    return model


def test_the_layers_compute_as_before_to_the_bit():
    model, plain = adapted(), Plain(nnx.Rngs(0))
    reference = without_adapters(model)
    reference.eval()
    plain.eval()
    np.testing.assert_array_equal(reference(X), plain(X))
    assert reference.blocks[0].kernel[...] is model.blocks[0].kernel[...], "the weights are there once"
    assert not model.drop.deterministic, "the model itself stays in training"
    model.eval()
    assert not np.allclose(model(X), plain(X), rtol=0.1)


def test_an_adapter_of_flax_and_those_that_a_glob_names():
    layer = trained(nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(0)))
    expected = nnx.Linear(4, 4, rngs=nnx.Rngs(0))(X)
    np.testing.assert_array_equal(without_adapters(layer)(X), expected)
    np.testing.assert_array_equal(without_adapters(layer, "lora/lora_b")(X), expected)


class LinenModel(nn.Module):
    """Each block has factors under the names that qwix gives them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = LinenStage(LinenBlock(name=f"block_{i}"))(x)
        return x


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        a = self.param("kernel_lora_a", nn.initializers.normal(1.0), (4, 2))
        b = self.param("kernel_lora_b", nn.initializers.normal(1.0), (2, 4))
        return jnp.tanh(nn.Dense(4)(x) + x @ a @ b)


def preference(model: Any, x: Any) -> jax.Array:
    """How far a model moves from its reference; the two calls are beside one another."""
    return -jax.nn.log_sigmoid(model(x) - without_adapters(model)(x) + 0.1 * x).mean()


def test_linen_in_a_trainer_as_in_plain_jax():
    module = LinenModel()
    variables = module.init(jax.random.key(0), X)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)}
    assert len(names) == 8
    trainer = PipelineTrainer(
        module, optax.sgd(0.1), preference, variables=variables, num_stages=2, num_microbatches=2, logging=False,
        training=Training(frozen=lambda path: "lora" not in path),
    )  # fmt: skip

    def loss_of(variables: Any) -> jax.Array:
        reference = module.apply(without_adapters(variables), X)
        return -jax.nn.log_sigmoid(module.apply(variables, X) - reference + 0.1 * X).mean()

    expected, gradients = jax.jit(jax.value_and_grad(loss_of))(variables)
    np.testing.assert_allclose(trainer.train_step(X)["loss"], expected, rtol=1e-5)
    after = trainer.gather_variables()["params"]["block_0"]["kernel_lora_a"]
    moved = variables["params"]["block_0"]["kernel_lora_a"] - 0.1 * gradients["params"]["block_0"]["kernel_lora_a"]
    np.testing.assert_allclose(after, moved, rtol=1e-5, atol=1e-6)  # a step of 0.1 is added to numbers of size 1
    assert [block.name for block in trainer.plan.blocks][:-1] == ["block_0", "block_1"], "both passes share stages"


def test_nnx_in_a_trainer_as_in_plain_jax():
    def made() -> Plain:
        model = adapted()
        model.eval()
        return model

    trainer = PipelineTrainer(
        made(), optax.sgd(0.1), preference, num_stages=2, num_microbatches=2, training=Training(wrt=nnx.LoRAParam),
        logging=False,
    )  # fmt: skip
    batches = [X, X[::-1].copy()]
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    model, expected = made(), []
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    for batch in batches:
        loss, gradients = nnx.value_and_grad(preference, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, gradients)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(trainer.plan.blocks) == 3, "two blocks and what follows them, in both passes"


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of qwix
@pytest.mark.parametrize("weights", [{}, {"weight_qtype": "nf4", "tile_size": 4}], ids=["float32", "nf4"])
def test_adapters_of_qwix(weights: dict[str, Any]):
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0, **weights)

    def made() -> Any:
        plain = Plain(nnx.Rngs(0))
        plain.eval()
        return qwix.apply_lora_to_model(plain, provider, X, rngs=nnx.Rngs(7))

    model, before = trained(made()), made()  # qwix's second factors begin at zero
    assert not np.allclose(model(X), before(X), rtol=0.1)
    np.testing.assert_array_equal(without_adapters(model)(X), before(X))


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of qwix
def test_adapters_of_qwix_in_linen():
    qwix = pytest.importorskip("qwix")
    module = qwix.apply_lora_to_model(nn.Dense(4), qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0))
    before = module.init(jax.random.key(0), X)
    params = {name: value + 0.3 * name.endswith("lora_b") for name, value in before["params"].items()}
    assert not np.allclose(module.apply({"params": params}, X), module.apply(before, X), rtol=0.1)
    np.testing.assert_array_equal(module.apply(without_adapters({"params": params}), X), module.apply(before, X))


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (lambda: Plain(nnx.Rngs(0)), ValueError, r"no parameter of the model is an nnx\.LoRAParam.*add_lora"),
        (lambda: {"params": {"w": X}}, ValueError, "no name in the collection params ends with lora_a"),
        (lambda: X, TypeError, "needs an NNX module.*got ndarray"),
    ],
)
def test_what_has_no_adapters_is_refused(model: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        without_adapters(model())


def test_a_glob_without_a_parameter_is_refused():
    with pytest.raises(ValueError, match="adapters='head/\\*' chooses no parameter"):
        without_adapters(adapted(), "head/*")
