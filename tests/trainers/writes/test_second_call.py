"""A call that changes more than values is refused if the next call would differ."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers.errors import ModelError

BATCH = np.ones((8, 4), np.float32)


def step_of(loss: Any) -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    trainer = PipelineTrainer(model, optax.sgd(0.1), loss, num_stages=1, num_microbatches=2, logging=False)
    trainer.train_step(BATCH)


class Sown(nnx.Variable):
    pass


def sows_a_type_of_its_own(model: Any, x: jax.Array) -> jax.Array:
    model.sow(Sown, "h", x.sum(), init_fn=lambda: 0.0, reduce_fn=lambda before, new: before + new)
    return jnp.mean(model(x) ** 2)


def sows_and_pops(model: Any, x: jax.Array) -> jax.Array:
    loss = sows_a_type_of_its_own(model, x)
    nnx.pop(model, Sown)
    return loss


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_a_sum_that_a_model_sows_is_popped_in_the_loss():
    said = re.escape("makes h, which the model does not have before") + ".*if the model sows it, pop it in the loss"
    with pytest.raises(ModelError, match=said):
        step_of(sows_a_type_of_its_own)
    step_of(sows_and_pops)


def begins_by_a_flag(model: Any, x: jax.Array) -> jax.Array:
    scale = 1.0 if getattr(model, "begun", False) else 2.0
    model.begun = True
    return jnp.mean(model(jax.checkpoint(lambda x: jnp.sin(scale * x))(x)) ** 2)


def reads_a_flag_in_backward(model: Any, x: jax.Array) -> jax.Array:
    scale = 1.0 if getattr(model, "begun", False) else 2.0
    model.begun = True

    @jax.custom_vjp
    def sine(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, cotangent: (scale * cotangent * cosine,))
    return jnp.mean(sine(model(x)) ** 2)


def reads_a_flag_in_a_tangent(model: Any, x: jax.Array) -> jax.Array:
    scale = 1.0 if getattr(model, "begun", False) else 2.0
    model.begun = True

    @jax.custom_jvp
    def sine(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    sine.defjvp(lambda given, tangents: (jnp.sin(*given), scale * jnp.cos(*given) * tangents[0]))
    return jnp.mean(sine(model(x)) ** 2)


def reads_an_array_by_a_flag(model: Any, x: jax.Array) -> jax.Array:
    rows = np.full(4, 1.0 if getattr(model, "begun", False) else 2.0, np.float32)
    model.begun = True
    return jnp.mean((rows * model(x)) ** 2)


@pytest.mark.parametrize("loss", [reads_a_flag_in_backward, reads_a_flag_in_a_tangent, reads_an_array_by_a_flag])
def test_a_flag_that_a_rule_or_an_array_depends_on(loss: Any):
    with pytest.raises(ModelError, match="changes the attribute begun from None to True"):
        step_of(loss)


def sets_a_flag(model: Any, x: jax.Array) -> jax.Array:
    model.begun = True

    @jax.custom_vjp
    def sine(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, cotangent: (2.0 * cotangent * cosine,))
    return jnp.mean(np.full(4, 2.0, np.float32) * sine(model(x)) ** 2)


def test_a_flag_on_which_nothing_depends():
    step_of(sets_a_flag)


@pytest.mark.parametrize("switch", [False, True])
def test_a_flag_that_is_read_under_remat(switch: bool):
    """In both implementations of `jax.checkpoint`."""
    before = getattr(jax.config, "jax_remat3")  # noqa: B009, as it is not among the typed names
    jax.config.update("jax_remat3", switch)
    try:
        with pytest.raises(ModelError, match="changes the attribute begun from None to True"):
            step_of(begins_by_a_flag)
    finally:
        jax.config.update("jax_remat3", before)
