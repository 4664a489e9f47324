"""Run by `test_equal_to_plain.py`: process 1 has another model."""

from __future__ import annotations

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax.engine.jit import mpmd_jit_with_loop  # noqa: E402
from jaxpp_flax.engine.tracing.markers import mark_stage_end  # noqa: E402
from jaxpp_flax.engine.tracing.treduce import treduce  # noqa: E402
from jaxpp_flax.processes.comparison import ProgramMismatchError  # noqa: E402
from jaxpp_flax.schedules import GPipe  # noqa: E402
from tests.processes.cases import mesh_of  # noqa: E402

function = jnp.tanh if jax.process_index() == 0 else jnp.sin


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two stages."""
    return jnp.mean(mark_stage_end(function(x @ w[0])) @ w[1])


def step(w: jax.Array, batch: jax.Array) -> object:
    """Gradients alone."""
    return treduce(lambda x: jax.value_and_grad(loss)(w, x), batch, GPipe(2))


try:
    mpmd_jit_with_loop(step, mesh_of(2, "rows"))(np.ones((2, 4, 4), np.float32), np.ones((2, 8, 4), np.float32))
except ProgramMismatchError as error:
    print(f"refused: {error}", flush=True)
