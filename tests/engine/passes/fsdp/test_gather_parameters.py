"""Which parameters of a loop are gathered, and what its body reads then."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.passes.fsdp.gather_parameters import gather_parameters
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.passes.loop.loop import Loop, loops_of
from jaxpp_flax.engine.passes.loop.open_loops import open_loops
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Concat, treduce
from jaxpp_flax.schedules import GPipe

AXES = {"fsdp": 2, "tensor": 2}


def step(params: Any, batch: jax.Array) -> Any:
    halves = {name: p.astype(jnp.bfloat16) for name, p in params.items()}

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(mark_stage_end(x @ p["a"]) @ p["b"] @ p["c"])

    return treduce(lambda x: jax.value_and_grad(loss)(halves, x), batch, schedule=GPipe(2))


def gathered(specs: dict[str, P], batch: P) -> Graph:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(AXES)).abstract_mesh
    params = {name: jnp.ones((4, 4)) for name in specs}
    graph, _ = from_jaxpr(jax.jit(step).trace(params, jnp.ones((2, 8, 4), jnp.bfloat16)).jaxpr)
    opened = open_loops(inline(graph, flatten=True), 2)
    names = dict(zip(opened.inputs, [*specs, "batch"], strict=True))
    rule = FsdpRule(mesh=mesh, names=names)
    made = gather_parameters(opened, [*specs.values(), batch], ShardCounts(AXES), rule)
    made.verify()
    assert gather_parameters(opened, [*specs.values(), batch], ShardCounts(AXES), None) is opened
    return made


SPECS = {"a": P("fsdp", "tensor"), "b": P("tensor"), "c": P(("tensor", "fsdp"))}


def test_parameters_over_the_axes_of_the_batch():
    """Also those that are converted before the loop; the other axes are kept, and the bytes are a device's."""
    (loop,) = loops_of(gathered(SPECS, P(None, "fsdp")), Loop)
    assert [g.spec for g in loop.gathered.values()] == [P(None, "tensor"), P("tensor")]
    assert {g.nbytes for g in loop.gathered.values()} == {4 * 4 * 2 // 2}
    assert set(loop.gathered) <= set(loop.body.constants)


def test_a_part_of_the_batch_that_no_microbatch_reads():
    def unread(params: Any, batch: Any) -> Any:
        def body(mb: Any) -> jax.Array:
            return mark_stage_end(mb["x"] @ params) @ params

        return treduce(body, batch, schedule=GPipe(2), operation=Concat())

    batch = {"x": jnp.ones((2, 8, 4)), "y": jnp.ones((2, 8, 4))}
    graph, _ = from_jaxpr(jax.jit(unread).trace(jnp.ones((4, 4)), batch).jaxpr)
    opened = open_loops(inline(graph, flatten=True), 2)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(AXES)).abstract_mesh
    specs = [P("fsdp"), P(None, "fsdp"), P(None, "fsdp")]
    rule = FsdpRule(mesh=mesh, names={})
    (loop,) = loops_of(gather_parameters(opened, specs, ShardCounts(AXES), rule), Loop)
    assert [v.aval.shape for v in loop.gathered] == [(4, 4)]


@pytest.mark.parametrize("batch", [P(), P(None, "tensor")])
def test_nothing_is_gathered(batch: P):
    specs = {"a": P("fsdp"), "b": P(), "c": P()}
    with pytest.raises(ValueError, match=r"fsdp='step' gathers .* but the step has none\. .*P\('fsdp',?\)"):
        gathered(specs, batch)
