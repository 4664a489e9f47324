"""How accumulators are partitioned where a step has several loops, and where an activation looks like a parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.specs import accumulator_spec
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.planning.predicted.blocks import Blocks
from jaxpp_flax.schedules import GPipe, Schedule, Std1F1B
from tests.engine.toys import built, chain, gradients, mesh_of
from tests.helpers import DIM, batch_of, tree_allclose


def square(schedule: Schedule | None, params: Any, batch: Any) -> Any:
    """Activations have the shape of the weights, and are partitioned as the gradients' parts are."""

    def body(b: Any) -> Any:
        def of(params: Any) -> jax.Array:
            x = jax.lax.with_sharding_constraint(jnp.tanh(b["x"] @ params[0]["w"]), P("data"))
            return jnp.mean((mark_stage_end(x) @ params[1]["w"] - b["y"]) ** 2)

        return jax.value_and_grad(of)(params)

    return treduce(body, batch, schedule)


def test_the_numbers_are_those_of_plain_jit():
    params, batch, mesh = chain(2), batch_of(4, rows=DIM), mesh_of(2, data=2)
    with jax.set_mesh(mesh.unstack[0]):
        expected = jax.jit(lambda p, b: square(None, p, b))(params, batch)
    compiled = mpmd_jit_with_loop(lambda p, b: square(Std1F1B(2), p, b), mesh, in_specs=(P(), P(None, "data")))
    actual = compiled(params, batch)
    # Sums of two shards and four microbatches in another order.
    tree_allclose(actual, expected, rtol=1e-6)


def aval(*shape: int, dtype: str = "float32") -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def test_the_argument_whose_spec_is_taken():
    """Where a step updates nothing, an argument of the accumulator's type that is partitioned gives the spec."""
    whole, other, sharded = (aval(4), P()), (aval(4, dtype="bfloat16"), P("data")), (aval(4), P("fsdp"))
    assert accumulator_spec(aval(4), None, None, [whole, other, sharded]) == P("fsdp")
    assert accumulator_spec(aval(4), None, None, [whole, other]) == P()
    assert accumulator_spec(aval(4), None, P("tensor"), [sharded]) == P("tensor")


def specs_of_sums(step: Any, weights: P, **options: Any) -> set[P]:
    """The specs of the first values of a step that updates nothing, on a mesh of data and tensor."""
    in_specs = ([{"w": weights, "b": P()}] * 2, P(None, "data"))
    jitted = mpmd_jit_with_loop(step, mesh_of(2, data=2, tensor=2), in_specs=in_specs, **options)
    program = jitted.place(chain(2), batch_of(4, rows=DIM)).program
    return {spec for task in program.tasks if task.name.startswith("init") for spec in task.out_specs}


def test_weights_say_how_their_gradients_are_partitioned():
    """Not activations of their type; nor what is made of a parameter before the loop: a cast, a gathered copy."""

    def cast(params: Any, batch: Any) -> Any:
        return square(Std1F1B(2), *jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch)))

    def uncast(params: Any, batch: Any) -> Any:
        return square(Std1F1B(2), params, batch)

    expected = P("data", None, "tensor")
    assert expected in specs_of_sums(uncast, P(None, "tensor"))
    assert expected in specs_of_sums(cast, P(None, "tensor"))
    assert expected in specs_of_sums(uncast, P("data", "tensor"), fsdp="step")


def test_shards_lead_once():
    """Whatever is partitioned over the axis of the shards is not taken as well."""
    both = P("data", "tensor"), P("data", None, "tensor")  # as ZeRO partitions an optimizer's state
    for wish, found in (*{P(None, "tensor"): P("data", None, "tensor"), P("data"): P("data")}.items(), both):
        assert accumulator_spec(aval(2, 4), (0, "data"), wish, ()) == found


def test_shards_keep_their_dimension():
    """A body that maps its work over the shards may return them in any dimension; a wish is for all others."""
    wishes = {
        P("tensor"): P("tensor", "data"),
        P(None, "tensor"): P(None, "data", "tensor"),
        P("data"): P(None, "data"),
    }
    for wish, found in wishes.items():
        assert accumulator_spec(aval(4, 2, 6), (1, "data"), wish, ()) == found


def test_the_estimate_before_the_cut_follows_the_same_rule():
    """A policy that fills memory counts a gradient's shards over the axes of the batch and of the parameter."""
    spec_of = {1: P(), 2: P(None, "tensor"), 3: P(None, "data")}
    found: dict[tuple[int, ...], P] = {}

    def policy(marks: Any, num_stages: int) -> list[int]:
        found.update({value.aval.shape: spec for value, spec in Blocks.of(marks).state_specs().items()})
        return [0]

    specs = [spec_of[leaf.ndim] for leaf in jax.tree.leaves((chain(2), batch_of(2)))]
    built(gradients(GPipe(2)), 2, chain(2), batch_of(2), specs=specs, axes={"data": 2, "tensor": 2}, policy=policy)
    assert found[2, DIM, DIM] == P("data", None, "tensor")
    assert found[2, DIM] == P("data")
