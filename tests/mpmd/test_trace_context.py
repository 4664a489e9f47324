"""JAX's settings around a call: as under `jax.jit`, a function is traced again for each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax import mpmd
from tests.mpmd.programs import WIDTH, batches, model, topology, weights


def test_settings_after_a_call_without_them():
    def fun(ws, x):
        return model(ws, x) / jnp.ones(WIDTH)

    ws, x = weights(2), batches(1)[0]
    ours = mpmd.jit(fun, mpmd.make_config(topology(1, 1), {"block_0": "m0", "block_1": "m1"}))
    expected = np.asarray(jax.jit(fun)(ws, x))
    # Products of 8 numbers of float32, summed in another order.
    np.testing.assert_allclose(ours(ws, x), expected, rtol=1e-5, atol=1e-6)
    with jax.numpy_rank_promotion("raise"):
        for function in (jax.jit(fun), ours):
            with pytest.raises(ValueError, match="rank_promotion"):
                function(ws, x)
    with (
        jax.disable_jit(),
        pytest.raises(RuntimeError, match=r"disable_jit is on .* a function under mpmd\.jit runs as"),
    ):
        ours(ws, x)
    poisoned = np.full(x.shape, np.nan, np.float32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\) .* in task .* \(rank 0"):
        ours(ws, poisoned)
    np.testing.assert_allclose(ours(ws, x), expected, rtol=1e-5, atol=1e-6)


def test_a_mesh_around_a_call_changes_nothing():
    ws, x = weights(2), batches(1)[0]
    ours = mpmd.jit(model, mpmd.make_config(topology(1, 1), {"block_0": "m0", "block_1": "m1"}))
    expected = np.asarray(ours(ws, x))
    compilations = ours.compiler.compilations
    other = mpmd.jit(model, mpmd.make_config(topology(1, 1), {"block_0": "m0", "block_1": "m1"}))
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("elsewhere",))):
        np.testing.assert_array_equal(ours(ws, x), expected)
        np.testing.assert_array_equal(other(ws, x), expected)
    assert ours.compiler.compilations == compilations


def test_side_effects_in_order_are_refused():
    def fun(ws, x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return model(ws, x)

    ours = mpmd.jit(fun, mpmd.make_config(topology(1, 1), {"block_0": "m0", "block_1": "m1"}))
    with pytest.raises(ValueError, match=r"side effect with ordered=True, .* Leave out ordered=True"):
        ours.lower(weights(2), batches(1)[0])
