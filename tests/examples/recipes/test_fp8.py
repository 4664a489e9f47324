"""The recipe in float8: as plain accumulation, and near the loss of bfloat16."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.examples.running import load_example, run_example


def test_equals_plain_accumulation():
    """In float32 around the float8 products: both sides round the same numbers by the same scales."""
    recipe = load_example("recipes/fp8.py")
    cfg = recipe.Config(layers=2, width=16, heads=2, length=8)
    trainer = recipe.make_trainer(cfg, num_stages=2, num_microbatches=2, precision=None, logging=False)
    start = recipe.in_float8(recipe.GPT(cfg, rngs=nnx.Rngs(5)))
    trainer.set_weights(start)
    rng = np.random.default_rng(0)
    batches = [{name: rng.integers(0, 256, (4, 8)).astype(np.int32) for name in ("tokens", "targets")} for _ in "12"]
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    graphdef, params, states = nnx.split(start, nnx.Param, ...)
    tx = optax.adamw(3e-3)

    @jax.jit
    def gradients_of(params: Any, states: Any, microbatch: Any) -> Any:
        loss_of = lambda params, states: recipe.loss_fn(nnx.merge(graphdef, params, states), microbatch)  # noqa: E731
        return jax.value_and_grad(loss_of, argnums=(0, 1), allow_int=True)(params, states)

    opt_state, expected = tx.init(params), []
    for batch in batches:
        parts = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for i in range(2)]
        (one, (g, s)), (two, (h, t)) = (gradients_of(params, states, part) for part in parts)
        updates, opt_state = tx.update(jax.tree.map(lambda a, b: (a + b) / 2, g, h), opt_state, params)
        params = optax.apply_updates(params, updates)
        # The gradient of a scale or a history is its next value: the largest of the microbatches.
        states = jax.tree.map(
            lambda old, a, b: jnp.maximum(a, b) if jnp.issubdtype(old.dtype, jnp.floating) else old, states, s, t
        )
        expected.append(float(one + two) / 2)
    # A number at the middle of two levels of float8 may go to either side; one level of one product is 1e-4 of a loss.
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.slow
def test_the_loss_is_near_that_of_bfloat16():
    printed = run_example("recipes/fp8.py", "--steps", "60")
    narrow, float8 = (float(loss) for loss in re.findall(r"held-out loss (\S+)", printed))
    assert narrow < 3.3, "a uniform guess has 5.5"
    assert abs(float8 - narrow) < 0.1
    assert "float8 keeps 96 scales and histories" in printed  # 2 of each for 3 operands of 16 layers
