"""The bytes that the optimizer and the average keep for each parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.trainers.step.facts.kept_bytes import kept_bytes
from jaxpp_flax.trainers.step.optimizer_update import Update


def test_the_average_of_narrow_weights_counts_as_wide():
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    params = {"w": jnp.ones((4, 8), jnp.bfloat16)}
    found = {}
    for decay in (None, 0.9):
        state = Update(tx=optax.sgd(0.1, momentum=0.9), ema_decay=decay).first_state(params, {})
        kept = kept_bytes(state, None, {}, mesh)
        found[decay] = sum(on_device for on_device, _ in kept)
    assert found == {None: 2 * 32, 0.9: (2 + 4) * 32}
