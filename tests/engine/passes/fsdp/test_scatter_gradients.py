"""The reduce-scatter of partial gradients, for every partition of a parameter: its sum, and each device's shard."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import keep_axes
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule, FsdpWarning
from jaxpp_flax.engine.passes.fsdp.scatter_gradients import scatter_sum
from jaxpp_flax.engine.tracing.ir import Graph, Value, emit

BATCH = ("data", "fsdp")


@pytest.mark.parametrize(
    ("spec", "collectives"),
    [
        (P("fsdp"), {"reduce-scatter", "all-reduce"}),  # over "data", the shards are summed
        (P(None, ("data", "fsdp")), {"reduce-scatter"}),
        (P("data", "fsdp"), {"reduce-scatter"}),
        (P(("tensor", "fsdp"), "data"), {"reduce-scatter"}),
        (P(("fsdp", "tensor")), None),  # a device's shard is in pieces: whatever XLA does
    ],
    ids=lambda value: str(value) if isinstance(value, P) else "",
)
def test_the_sum_of_parts(spec: P, collectives: set[str] | None):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    before = P(BATCH, *keep_axes(spec, lambda name: name not in BATCH).partitions)
    rule = FsdpRule(mesh=mesh.abstract_mesh, names={})
    parts = jnp.arange(4.0 * 8 * 8).reshape(4, 8, 8)  # whole numbers: any order of sums gives the same bits
    (total,), _ = emit(lambda x: jax.lax.reduce_sum(x, (0,)), [Value(jax.typeof(parts))])
    with nullcontext() if collectives else pytest.warns(FsdpWarning, match=r"over \('fsdp', 'tensor'\) in one dim"):
        equations = scatter_sum(total, total.outputs[0], (before, spec), rule, total.outputs[0])
    graph = Graph((total.inputs[0],), total.outputs, tuple(equations))  # type: ignore[arg-type]
    on = jax.device_put(parts, NamedSharding(mesh, before))
    compiled = jax.jit(lambda x: graph.run(x)[0], out_shardings=NamedSharding(mesh, spec)).lower(on).compile()
    np.testing.assert_array_equal(compiled(on), parts.sum(0))
    if collectives is not None:
        text = compiled.as_text() or ""
        assert {kind for kind in ("reduce-scatter", "all-reduce", "all-gather") if f"{kind}(" in text} == collectives
