"""What a compiled task keeps of the user's function."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from tests.engine.toys import mesh_of


def test_compiled_code_keeps_the_scopes():
    def forward(w, x):
        with jax.named_scope("my_scope"):
            x = jnp.tanh(x @ w[0])
        return mark_stage_end(x) @ w[1]

    compiled = mpmd_jit(forward, mesh_of(2)).compile([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))
    assert "my_scope/tanh" in compiled.executables.tasks[1].as_text()
