"""A front chooses the class of a compiled step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.jit import MpmdFunction, one_pass
from jaxpp_flax.engine.pipeline import CompiledPipeline, PlacedPipeline
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from tests.engine.toys import mesh_of


class Step(CompiledPipeline):
    """A step of another front."""


class Placed(PlacedPipeline):
    _compiled_type = Step


class Function(MpmdFunction):
    _placed_type = Placed


def test_a_step_follows_its_front():
    mesh = mesh_of(2)

    def fun(w: jnp.ndarray, x: jnp.ndarray) -> jnp.ndarray:
        return mark_stage_end(x @ w) @ w

    step = Function(one_pass(fun, mesh), mesh)
    y = step(jnp.eye(2), jnp.ones((1, 2)))
    assert type(step.compile(jnp.eye(2), jnp.ones((1, 2)))) is Step
    np.testing.assert_array_equal(step(y.T @ y, y), [[4, 4]])
