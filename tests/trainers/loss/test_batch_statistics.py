"""Which variables declared as statistics of a batch are such: those that normalise their own batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import ModelError
from tests.trainers import models as m
from tests.trainers.loss.test_loss_trace import BATCH, Normed, make_trainer, warned

OWN, MOVED = "BatchStatisticsWarning", "MicrobatchStateWarning"


class Declared(m.Layers):
    """A model whose state is all declared as statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.count = nnx.BatchStat(jnp.zeros(self.WIDTH)), nnx.BatchStat(jnp.int32(0))
        self.hidden = nnx.BatchStat(jnp.zeros((2, self.WIDTH)))


def writing(new: Callable[..., Any], name: str = "state") -> Callable[..., Any]:
    """Return a loss with `new(value, outputs)` as the next value, and what becomes of the outputs."""

    def loss_fn(model, batch):
        variable, outputs = getattr(model, name), model(batch["x"])
        written, outputs = new(variable[...], outputs)
        variable[...] = jax.lax.stop_gradient(written)
        return jnp.square(outputs - batch["y"]).mean()

    return loss_fn


def centred(value, outputs):
    mean = outputs.mean(0)
    return 0.9 * value + 0.1 * mean, outputs - mean


def scaled(value, outputs):
    largest = jnp.maximum(value, jnp.abs(outputs).max(0))
    return largest, outputs / largest


KINDS: dict[str, tuple[list[str], Callable[..., Any]]] = {
    "centre": ([MOVED], writing(lambda v, x: (0.9 * v + 0.1 * x.mean(0), jax.nn.softmax(x - v)))),
    "mean that nobody reads": ([MOVED], writing(lambda v, x: (0.9 * v + 0.1 * x.mean(0), x))),
    "average of the loss": ([MOVED], writing(lambda v, x: (0.9 * v + 0.1 * jnp.square(x).mean(), x))),
    "calls": ([MOVED], writing(lambda v, x: (v + 1, x), "count")),
    "examples": ([], writing(lambda v, x: (v + len(x), x), "count")),
    "sum": ([], writing(lambda v, x: (v + x.sum(0), x))),
    "mean of the batch": ([OWN], writing(centred)),
    "largest of the batch": ([OWN], writing(scaled)),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_microbatches", [2, 4])  # of two examples, and of one
def test_what_normalises_its_own_batch(name, num_microbatches):
    expected, loss_fn = KINDS[name]
    told = warned(make_trainer(loss_fn, num_microbatches, Declared))
    assert [text.partition(":")[0] for text in told] == expected


def test_a_hidden_state_is_refused_whatever_it_is_declared_as():
    loss_fn = writing(lambda v, x: (jnp.tanh(x + v), jnp.tanh(x + v)), "hidden")
    with pytest.raises(ModelError, match="a row for each example"):
        make_trainer(loss_fn, model=Declared).step_function(BATCH)


def test_batch_norm_for_one_size_and_in_calls():
    def one_size(model, batch):
        return jnp.square(model(batch["x"].reshape(2, 2, 2).reshape(2, 4)) - batch["y"]).mean()

    def called(model, batch):
        return nnx.remat(lambda model, x: jnp.square(model(x)).mean())(model, batch["x"])

    for loss_fn in (one_size, called):
        (text,) = warned(make_trainer(loss_fn, model=Normed))
        assert text.startswith(OWN)
        assert "norm/mean, norm/var" in text


class LinenNormed(nn.Module):
    """A BatchNorm, and after it a centre in the same collection."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        centre = self.variable("batch_stats", "centre", jnp.zeros, 4)
        before = centre.value
        if not self.is_initializing():
            centre.value = 0.9 * before + 0.1 * jax.lax.stop_gradient(x).mean(0)
        return x - before


def test_a_centre_behind_a_batch_norm_in_linen():
    module = LinenNormed()
    variables = module.init(jax.random.key(0), np.ones((2, 4), np.float32))
    trainer = PipelineTrainer(
        module, optax.sgd(0.1), m.squared_error, num_stages=1, num_microbatches=2, logging=False, variables=variables
    )
    own, moved = warned(trainer)
    assert own.startswith(OWN)
    assert "centre" not in own
    assert moved.startswith(MOVED)
    assert "moves collections/batch_stats/centre in each" in moved
