"""A step is placed and compiled for devices that are only described, and refuses to run there."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from jaxpp_flax.engine.arrays import mesh as meshes
from jaxpp_flax.engine.arrays import placing
from tests.compilers.machines import ONE_HOST, mesh_of

SHIFT = np.arange(4.0, dtype=np.float32)  # a constant that the step closes over
MATRIX = jax.ShapeDtypeStruct((4, 4), jnp.float32)
SHAPES = (0, [MATRIX, MATRIX], jax.ShapeDtypeStruct((4, 2, 4), jnp.float32))


def train_step(step: Any, params: list[jax.Array], batch: jax.Array) -> Any:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((jaxpp.mark_stage_end(jnp.tanh((x + SHIFT) @ params[0])) @ params[1]) ** 2)

    gradient = partial(jax.value_and_grad(loss), params)
    losses, grads = jaxpp.treduce(gradient, batch, schedule=jaxpp.Std1F1B(2))
    return step + 1, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def check(devices: Any) -> None:
    mesh = jaxpp.MpmdMesh(Mesh(np.array(devices).reshape(2, 2), ("stage", "data")), "stage")
    step = jaxpp.mpmd_jit_with_loop(train_step, mesh, in_specs=(P(), P("data"), P(None, "data")), donate_argnums=1)
    placed = step.trace_and_place(*SHAPES)
    assert [sorted(sharding.mesh_ids) for sharding in placed.in_shardings[0][1]] == [[0], [1]]
    compiled = placed.infer_intermediate_shardings().mpmdify()
    assert compiled.out_shardings[1][0].spec == P("data")
    assert len(compiled.memory_analysis()) == len(compiled.stages) == 2
    assert jax.tree.leaves(compiled.read_here) == [True] * 4
    for run in (step, compiled, compiled.profile):
        with pytest.raises(RuntimeError, match=r"only has a description of them .*`jax\.devices\(\)` lists the mesh's"):
            run(0, [jnp.eye(4), jnp.eye(4)], jnp.ones((4, 2, 4)))


def test_devices_that_are_not_attached(monkeypatch: pytest.MonkeyPatch):
    # On CPU, JAX has no descriptions of devices.
    devices = jax.devices()[:4]
    monkeypatch.setattr(meshes, "is_described", lambda _: True)
    monkeypatch.setattr(placing, "copy_arrays", None)  # nothing is put on them
    monkeypatch.setattr(jax, "device_put", None)
    check(devices)


@pytest.mark.compilers
@pytest.mark.parametrize("machine", ONE_HOST)
def test_devices_that_are_not_there(machine: str):
    check(mesh_of(machine, {"stage": 2, "data": 2}).devices)
