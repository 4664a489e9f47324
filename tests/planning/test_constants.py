"""A model whose code holds an array, as a table of levels: a plan counts it with no state of an optimizer."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import plan
from tests.trainers import models as m

TABLE = jnp.linspace(-1.0, 1.0, 16)


class Rounded(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) + TABLE[jnp.clip(x * 4 + 8, 0, 15).astype(jnp.int32)]


def test_a_table_in_the_code_of_a_model():
    model = nnx.Sequential(*[PipelineStage(Rounded(rngs=nnx.Rngs(i))) for i in range(2)])
    trainer = PipelineTrainer(
        model, optax.adam(0.1), m.squared_error, num_stages=2, num_microbatches=2, mesh={}, logging=False
    )
    planned = plan(trainer, m.make_xy(8))
    assert len(planned.peak_bytes) == 2
