"""A copy in memory knows whether its parameters are finite."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.memory.copies import Part, StateCopy


def test_of_each_share_a_parameter_that_is_not_finite_is_named():
    values = {
        "opt_state/m": np.array([np.inf]), "params/a": np.arange(3), "params/b": np.array([1.0, np.nan], jnp.bfloat16),
    }  # fmt: skip
    types = {path: (array.shape, str(array.dtype)) for path, array in values.items()}
    parts = {path: [Part((0,), of)] for path, of in values.items()}
    copy = StateCopy(serial=1, types=types, abouts=[{}], _parts=parts)
    assert (copy.nonfinite(0, 1), copy.nonfinite(0, 2), copy.nonfinite(1, 2)) == ("params/b", None, "params/b")
