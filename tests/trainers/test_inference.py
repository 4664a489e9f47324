"""The mean over batches, examples without weight, and functions with gradients by their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.schedules import ZBV, InterleavedGPipe, Schedule, Std1F1B, validate
from jaxpp_flax.trainers import Inference, Logging
from jaxpp_flax.trainers.inference import Average
from jaxpp_flax.trainers.loss.loss_rule import LossTerms
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly
from tests.helpers import slow
from tests.trainers.models import Layers


def test_examples_without_weight_have_no_mean_loss():
    average = Average()
    average.add(LossTerms(total=0.0, weight=0.0, metrics={}), num_microbatches=2, num_examples=8)
    with pytest.raises(ValueError, match="every example of the evaluation has weight 0"):
        average.result()


def test_a_metric_without_weight_is_not_a_number():
    average = Average()
    per_class = (np.array([0.0, 3.0]), np.array([0.0, 4.0]))
    average.add(LossTerms(total=4.0, weight=8.0, metrics={"accuracy": per_class}), num_microbatches=2, num_examples=8)
    found = average.result()
    assert found["loss"] == 0.5
    np.testing.assert_array_equal(found["accuracy"], [np.nan, 0.75])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_call_passes_a_guard_against_transfers(num_stages: int):
    """Batches and outputs move as the user has asked, at 8 examples and at 7, which two devices share unevenly."""
    trainer = PipelineTrainer(
        Layers(), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=num_stages, num_microbatches=2,
        mesh={"data": 2}, logging=Logging(progress=False),
    )  # fmt: skip
    x = np.ones((8, 4), np.float32)
    expected = trainer.predict(x)
    with jax.transfer_guard("disallow"):
        got = trainer.predict(x)
        odd = trainer.predict(x[:7])
        trainer.evaluate([x, x[:7]])
        trainer.train_step(x)
        trainer.fit([x], steps=1)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(odd, expected[:7], rtol=1e-6)
    assert (type(got), got.dtype, got.devices()) == (type(expected), jnp.float32, {jax.devices()[0]})


def forces(model: Any, x: Any) -> jax.Array:
    """A force field: the gradient of an energy by the places."""
    return -jax.grad(lambda x: model(x).sum())(x)


def second_derivative(model: Any, x: Any) -> jax.Array:
    """What the equation of a physics-informed network holds."""
    first = lambda x: jax.grad(lambda x: model(x).sum())(x)[:, 0].sum()  # noqa: E731
    return jax.grad(first)(x)[:, :1]


def score(model: Any, x: Any) -> jax.Array:
    """Sliced score matching: a product with the Jacobian, and the score itself."""
    found, product = jax.vjp(model, x)
    directions = jnp.broadcast_to(jnp.sin(jnp.arange(1.0, x.shape[-1] + 1)), x.shape)
    return product(directions)[0] * directions + 0.5 * found**2


def jacobian(model: Any, x: Any) -> jax.Array:
    return jax.vmap(jax.jacrev(lambda one: model(one[None])[0]))(x)


@pytest.mark.filterwarnings("ignore:.*differentiates a gradient")
@pytest.mark.parametrize(
    ("function", "num_stages", "schedule", "microbatches"),
    [
        (forces, 2, "1f1b", 3),
        (score, 4, "zbv", 4),
        (second_derivative, 2, "zero_bubble", 2),
        slow(second_derivative, 4, "interleaved_1f1b", 6),
        slow(jacobian, 2, "gpipe", 1),
    ],
)
def test_gradients_by_the_inputs_are_those_of_plain_jax(
    function: Callable[..., Any], num_stages: int, schedule: str, microbatches: int
):
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(function(model, batch["x"]) ** 2)

    def eval_loss_fn(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch), {"mean": function(model, batch["x"]).mean()}

    model, batch = Layers(num_stages), {"x": np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)}
    inference = Inference(predict_fn=lambda model, batch: function(model, batch["x"]), eval_loss_fn=eval_loss_fn)
    ranks = 2 if schedule in ("zbv", "interleaved_1f1b") else num_stages
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]).reshape(ranks, 1), ("stage", "data"))
    trainer = PipelineTrainer(
        model, optax.sgd(0.1), loss_fn, num_stages=num_stages, num_microbatches=microbatches, schedule=schedule,
        mesh=mesh, logging=False, inference=inference,
    )  # fmt: skip
    expected = jax.jit(function, static_argnums=0)(model, batch["x"])
    np.testing.assert_allclose(trainer.predict(batch), expected, rtol=1e-5, atol=1e-6)
    found = trainer.evaluate([batch])
    np.testing.assert_allclose(found["loss"], np.mean(expected**2), rtol=1e-5)
    np.testing.assert_allclose(found["mean"], np.mean(expected), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(trainer.train_step(batch)["loss"], np.mean(expected**2), rtol=1e-5)


@pytest.mark.parametrize("training", [Std1F1B(4), ZBV(8, 4), InterleavedGPipe(4, 2)], ids=str)
def test_a_forward_schedule_with_backward_tasks_is_legal_and_holds_as_many_microbatches_as_stages(training: Schedule):
    made = ForwardOnly(training).with_backward()
    for microbatches in (1, 3, 4, 9):
        validate(made, microbatches)
        assert [made.rank_of(s) for s in range(made.num_stages)] == [
            training.rank_of(s) for s in range(training.num_stages)
        ]
        assert made.max_live_microbatches(0, microbatches) == min(microbatches, training.num_stages)
    assert training.with_backward() is training
