"""Loops as they are opened: the schedule of a function without one, and operations of which JAX knows little.

Stages call back to the host, or partition an operation by a rule of their own: as under plain `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.loop.open_loops import OnePass
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import ScheduleError, Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, slow_but, tree_allclose


def with_cosine(sine: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`sine`, of which JAX cannot know the derivative."""
    function = jax.custom_vjp(sine)
    function.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),))
    return function


@with_cosine
def host_sine(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@custom_partitioning
def partitioned(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


partitioned.def_partition(
    partition=lambda mesh, arguments, result: (mesh, jnp.sin, result.sharding, (result.sharding,)),
    sharding_rule="i j -> i j",
)
partitioned_sine = with_cosine(partitioned)

MESHES = {"stages": mesh_of(2), "data": mesh_of(2, data=2), "data, explicit": mesh_of(2, AxisType.Explicit, data=2)}


@pytest.mark.parametrize("case", slow_but(MESHES, "stages", "data, explicit"))
def test_equal_to_plain(case: str):
    seen: list[tuple[int, float]] = []

    def tell(stage: int, x: jax.Array) -> None:
        io_callback(lambda value: seen.append((stage, float(value))), None, jax.lax.stop_gradient(x).sum())

    def loss(params: Any, batch: Any) -> jax.Array:
        x = host_sine(batch["x"] @ params[0]["w"])
        tell(0, x)
        x = mark_stage_end(x, "layer_0")
        x = partitioned_sine(x @ params[1]["w"])
        tell(1, x)
        return jnp.mean((x - batch["y"]) ** 2)

    step, params, batch = gradients(Std1F1B(2), loss), [{"w": p["w"]} for p in chain(2)], batch_of(2)
    expected = jax.jit(step)(params, batch)
    jax.effects_barrier()
    told = sorted(seen)
    seen.clear()
    pipelined = mpmd_jit_with_loop(step, MESHES[case], in_shardings=(P(), P() if case == "stages" else P(None, "data")))
    actual = jax.tree.map(np.asarray, pipelined(params, batch))
    jax.effects_barrier()
    # Sums of float32 in another order, where the rows are shared: sixteen units in the last place.
    tree_allclose(actual, expected, rtol=1e-6)
    assert len(told) == 4, "once for each stage and microbatch"
    assert [stage for stage, _ in sorted(seen)] == [stage for stage, _ in told]
    # The sums cancel: their rounding is that of the 128 terms, of size 1 at most.
    np.testing.assert_allclose([value for _, value in sorted(seen)], [value for _, value in told], atol=1e-5)


@pytest.mark.parametrize(
    ("written", "live", "stages"),
    [(3, 3, 4), (4, 4, 4), (4, 3, 4), (4, 2, 3), (3, 0, 1), (2, 1, 4), (9, 5, 4)],
)
def test_dead_stages_are_left_out_if_enough_marks_are_written(written: int, live: int, stages: int):
    schedule = OnePass(4).without_dead_stages(written, live)
    assert (schedule.num_stages, schedule.num_ranks) == (stages, 4)
    assert [len(tasks) for tasks in schedule.tasks(1)] == [2] * stages + [0] * (4 - stages)


def test_each_rank_runs_its_stages_forward_then_backward():
    assert str(OnePass(4, 2).tasks(1)[1]) == "[fwd_1__0, fwd_3__0, bwd_3__0, bwd_1__0]"
    with pytest.raises(ScheduleError, match="cannot be divided evenly"):
        OnePass(5, 4)
