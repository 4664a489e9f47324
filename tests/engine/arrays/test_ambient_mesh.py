"""Whatever mesh `jax.set_mesh` puts around a step, its trace, compilation and numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, mesh_of, sgd_step
from tests.helpers import batch_of, slow_but, tree_allclose

KINDS = [AxisType.Auto, AxisType.Explicit]
PARAMS, BATCH = chain(2), batch_of(2)
AMBIENT: dict[str, Callable[[MpmdMesh], Mesh]] = {
    "whole": lambda mesh: mesh.jax_mesh,
    "submesh": lambda mesh: mesh.unstack[1],
    "unrelated": lambda mesh: Mesh(np.array(jax.devices()[5:8]), ("other",)),
    "unrelated_explicit": lambda mesh: Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Explicit,)),
}


def pipelined(step: Callable[..., Any], mesh: MpmdMesh) -> MpmdFunction:
    return mpmd_jit_with_loop(step, mesh, in_specs=(P(), P(None, "data")))


@pytest.mark.parametrize("kind", slow_but(KINDS, AxisType.Explicit))
def test_around_the_first_step_and_around_compile(kind: AxisType):
    mesh = mesh_of(2, kind, data=2)
    seen: list[AbstractMesh] = []

    def step(params: Any, batch: Any) -> Any:
        seen.append(jax.sharding.get_abstract_mesh())
        return sgd_step(Std1F1B(2))(params, batch)

    alone = pipelined(step, mesh)
    expected = jax.tree.map(np.asarray, alone(PARAMS, BATCH))
    for make in AMBIENT.values():
        function = pipelined(step, mesh)
        with jax.set_mesh(make(mesh)):
            compiled = function.compile(PARAMS, BATCH)
            inside = function(PARAMS, BATCH)
            again = alone(PARAMS, BATCH)
        tree_allclose((inside, again), (expected, expected), rtol=0, atol=0)
        tree_allclose(compiled(PARAMS, BATCH), expected, rtol=0, atol=0)
        assert compiled.as_text() == alone.compile(PARAMS, BATCH).as_text()
    assert set(seen) == {mesh.abstract_submesh}


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_to_the_mesh_of_a_rank(kind: AxisType):
    """As docs/coming_from/jaxpp.md shows: `NamedSharding` on `mpmd_mesh.lowering_mesh()`, or on another rank's mesh."""
    mesh = mesh_of(2, kind, data=2)
    constrain = jax.lax.with_sharding_constraint if kind is AxisType.Auto else jax.sharding.reshard

    def step_to(*submeshes: Mesh) -> Callable[..., Any]:
        def loss(params: Any, batch: Any) -> jax.Array:
            x = jnp.tanh(batch["x"] @ params[0]["w"])
            for submesh in submeshes:
                x = constrain(jnp.sin(x), NamedSharding(submesh, P("data")))
            return jnp.mean((mark_stage_end(x) @ params[1]["w"] - batch["y"]) ** 2)

        return lambda params, batch: treduce(
            lambda b: jax.value_and_grad(loss)(params, b), batch, schedule=Std1F1B(2)
        )  # fmt: skip

    sub = mesh.unstack[0]
    with jax.set_mesh(sub):
        arguments = (
            jax.device_put(PARAMS, NamedSharding(sub, P())),
            jax.device_put(BATCH, NamedSharding(sub, P(None, "data"))),
        )
        expected = jax.jit(step_to(sub, sub, sub))(*arguments)
    compiled = pipelined(step_to(mesh.lowering_mesh(), *mesh.unstack), mesh)
    # A mean over shards, and a sum of two microbatches in another order.
    tree_allclose(compiled(PARAMS, BATCH), expected, rtol=1e-6)


def test_an_error_of_the_steps_own_is_met_once():
    """Only a step that names the whole mesh is traced again: what a step prints or counts happens once."""
    calls: list[None] = []

    def step(params: Any, batch: Any) -> Any:
        calls.append(None)
        raise ValueError("my mesh has holes")

    with pytest.raises(ValueError, match="my mesh has holes"):
        pipelined(step, mesh_of(2, data=2))(PARAMS, BATCH)
    assert len(calls) == 1
