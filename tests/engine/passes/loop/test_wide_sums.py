"""Products whose result is narrower than their operands, summed over a dimension that a data axis shards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.loop.wide_sums import with_wide_sums
from jaxpp_flax.engine.tracing.ir import everywhere, from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Schedule, Std1F1B
from jaxpp_flax.trainers.step.builder import ForwardOnly
from tests.helpers import tree_allclose

EXAMPLES, DIM = 4, 4
NARROWED = [
    ("float32", "int32"), ("float32", "int16"), ("float32", "bool"), ("float32", "float16"), ("float32", "bfloat16"),
    ("bfloat16", "int32"), ("bfloat16", "float16"), ("int8", "float16"), ("float8_e4m3fn", "int32"),
]  # fmt: skip
AS_THEY_ARE = [
    ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16"),
    ("int32", "float32"), ("int32", "uint32"), ("int8", "int32"), ("bool", "int32"), ("complex64", "float32"),
]  # fmt: skip


def product(x: jax.Array, y: jax.Array, result: str) -> jax.Array:
    # On an Explicit mesh JAX must be told how the sum of shards is partitioned.
    told = P() if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types else None
    numbers = (((0,), (0,)), ((), ()))
    return lax.dot_general(x, y, numbers, preferred_element_type=jnp.dtype(result), out_sharding=told)


def ragged(x: jax.Array, y: jax.Array, result: str) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    sizes = jnp.array([EXAMPLES], jnp.int32)
    return lax.ragged_dot_general(x, y, sizes, numbers, preferred_element_type=jnp.dtype(result))


def products(b: Any) -> dict[str, Any]:
    """For each pair of dtypes, in a scan and in a condition."""
    found: dict[str, Any] = {
        f"{operand} {result}": product(b["x"].astype(operand), b["y"].astype(operand), result)
        for operand, result in NARROWED
    }
    x, y = b["x"], b["y"]
    found["scan"] = lax.scan(lambda c, w: (c, product(x * w, y, "int32")), 0, jnp.ones(2))[1]
    found["cond"] = lax.cond(b["x"].ndim > 1, lambda: product(x, y, "int32"), lambda: product(y, x, "int32"))
    return found


def loop(weight: jax.Array, batch: Any, schedule: Schedule | None) -> Any:
    def body(b: Any) -> Any:
        hidden = mark_stage_end(b["z"] @ weight)
        return products(b), (hidden @ weight).sum()

    return treduce(body, batch, schedule)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shards_add_up_before_the_sum_is_narrowed(axis_type: AxisType):
    rng = np.random.default_rng(0)
    shape = (2, EXAMPLES, DIM)
    # Quarters: sums of their products are exact in float32, those of single shards are no integers.
    batch = {name: (rng.integers(-5, 6, shape) / 4).astype(np.float32) for name in "xyz"}
    batch["x"][:, 0], batch["x"][:, -1] = 300, -300  # the shards' parts leave float16, the sum does not
    batch["y"][:, 0], batch["y"][:, -1] = 300, 300
    weight = np.eye(DIM, dtype=np.float32)
    expected = jax.jit(loop, static_argnums=2)(weight, batch, None)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data"), axis_types=(axis_type,) * 2), "stage")
    step = mpmd_jit_with_loop(loop, mesh, in_specs=(P(), P(None, "data")), static_argnums=2)
    actual = step(weight, batch, ForwardOnly(Std1F1B(2)))
    tree_allclose(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected), rtol=0, atol=0)


@pytest.mark.parametrize(("operand", "result"), AS_THEY_ARE)
def test_parts_that_add_up_are_left_alone(operand: str, result: str):
    x = jax.ShapeDtypeStruct((EXAMPLES, DIM), jnp.dtype(operand))
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x, y: product(x, y, result))(x, x))
    assert with_wide_sums(graph) is graph


def test_products_of_groups():
    """`ragged_dot_general` has the same option; it is cut off behind the sum as well."""
    x = jax.ShapeDtypeStruct((EXAMPLES, DIM), jnp.float32)
    graph, _ = from_jaxpr(jax.make_jaxpr(jax.jit(lambda x, y: ragged(x, y, "int32")))(x, x))
    before, after = ([e.primitive.name for e in everywhere(g)] for g in (graph, with_wide_sums(graph)))
    assert [name for name in after if name not in before] == ["convert_element_type"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_products_inside_a_shard_map(axis_type: AxisType):
    """What varies over devices there still does."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])

    def shard(x: jax.Array) -> jax.Array:
        numbers = (((0,), (0,)), ((), ()))
        narrow = lax.dot_general(x, x, numbers, preferred_element_type=jnp.dtype("int32"))
        return lax.psum(narrow * x[0].astype(jnp.int32), "data")

    with jax.set_mesh(mesh):
        run = jax.shard_map(shard, in_specs=P("data"), out_specs=P())
        x = np.arange(EXAMPLES * DIM, dtype=np.float32).reshape(EXAMPLES, DIM)
        x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        graph = with_wide_sums(from_jaxpr(jax.make_jaxpr(run)(x))[0])
        np.testing.assert_array_equal(jax.jit(graph.run)(x)[0], run(x))
