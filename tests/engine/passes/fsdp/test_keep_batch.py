"""What scans start from is divided as the examples are: which operands of which scans get a constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.passes.fsdp.keep_batch import keep_batch
from jaxpp_flax.engine.passes.loop.loop import Loop, loops_of
from jaxpp_flax.engine.passes.loop.open_loops import open_loops
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, treduce
from jaxpp_flax.schedules import GPipe

AXES = {"data": 2, "fsdp": 2}
DIM, ROWS = 3, 8
ANY = P.UNCONSTRAINED


def mesh_of(kind: AxisType) -> AbstractMesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(AXES), axis_types=(kind,) * 2).abstract_mesh


MESH = mesh_of(AxisType.Auto)


def opened(stage: Callable[[jax.Array, jax.Array], jax.Array]) -> Graph:
    def body(x: jax.Array, stack: jax.Array) -> jax.Array:
        return stage(mark_stage_end(jnp.sin(x)), stack).sum()

    def step(stack: jax.Array, batch: jax.Array) -> Any:
        return treduce(lambda x: body(x, stack), batch, schedule=GPipe(2), operation=Add)

    graph, _ = from_jaxpr(jax.jit(step).trace(jnp.ones((5, DIM, DIM)), jnp.ones((2, ROWS, DIM))).jaxpr)
    return open_loops(inline(graph, flatten=True), 2)


def kept(step: Graph, batch: P, submesh: AbstractMesh | None = MESH) -> Graph:
    return keep_batch(step, [P(None, "fsdp"), batch], ShardCounts(AXES), submesh)


def constraints(step: Graph) -> list[P]:
    (loop,) = loops_of(step, Loop)
    loop.body.verify()
    (scan,) = [e for e in loop.body.equations if e.name == "scan"]
    made = [loop.body.producer.get(atom) for atom in scan.inputs]  # type: ignore[arg-type]
    return [e.params["sharding"].spec for e in made if e is not None and e.name == "sharding_constraint"]


def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]


def zeros_first(x: jax.Array, stack: jax.Array) -> jax.Array:
    """Two leaves get examples from `x`, in their second dimension; the third one sums over them."""

    def cell(carry: Any, w: jax.Array) -> Any:
        a, b, total = carry
        return (a + (x @ w).T, b + x.T, total + x.sum()), None

    a, b, total = jax.lax.scan(cell, (jnp.zeros((DIM, ROWS)), jnp.ones((DIM, ROWS)), 0.0), stack)[0]
    return a * b + total


@pytest.mark.parametrize(
    ("axes", "entry"), [("fsdp", "fsdp"), (("data", "fsdp"), ("data", "fsdp")), ("data", "data"), (("data",), "data")]
)
def test_the_carry_of_a_scan(axes: Any, entry: Any):
    assert constraints(kept(opened(layers), P(None, axes))) == [P(entry, ANY)]


def test_a_carry_that_begins_without_examples():
    assert constraints(kept(opened(zeros_first), P(None, "fsdp"))) == [P(ANY, "fsdp")] * 2


def test_a_constraint_of_the_user_is_left():
    def moved(x: jax.Array, stack: jax.Array) -> jax.Array:
        elsewhere = NamedSharding(MESH, P(None, "fsdp"))
        return layers(jax.lax.with_sharding_constraint(x[:, : DIM - 1], elsewhere), stack[:, : DIM - 1, : DIM - 1])

    def moved_inside(x: jax.Array, stack: jax.Array) -> jax.Array:
        elsewhere = NamedSharding(MESH, P(None, "fsdp"))
        cell = lambda x, w: (jax.lax.with_sharding_constraint(x @ w, elsewhere), None)  # noqa: E731
        return jax.lax.scan(cell, x[:, : DIM - 1], stack[:, : DIM - 1, : DIM - 1])[0]

    for stage in (moved, moved_inside):
        step = opened(stage)
        found = kept(step, P(None, "fsdp"))
        assert loops_of(found, Loop) == loops_of(step, Loop)


def test_nothing_to_keep():
    """No batch over axes of several devices, no scan, types that say all, no mesh."""
    step, plain = opened(layers), opened(lambda x, stack: x @ stack[0])
    assert loops_of(kept(step, P()), Loop) == loops_of(step, Loop)
    assert loops_of(kept(plain, P(None, "fsdp")), Loop) == loops_of(plain, Loop)
    for submesh in (mesh_of(AxisType.Explicit), None):
        assert kept(step, P(None, "fsdp"), submesh) is step
