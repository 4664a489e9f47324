"""Unnamed work goes where few bytes are transferred."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax import mpmd
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.mpmd.partitioning.infer import PlacedNodes, infer
from jaxpp_flax.mpmd.partitioning.nodes import Step, nodes_of
from tests.mpmd.programs import accumulate, batches, config, in_runs, topology, weights


def step_of(fun: Any, *arguments: jax.Array) -> Step:
    graph, _ = from_jaxpr(jax.jit(fun).trace(*arguments).jaxpr)
    return nodes_of(graph)


def placed(step: Step) -> PlacedNodes:
    fixed = {n: int(n.origin.name[1:]) for n in step.nodes if n.origin is not None}
    return infer(step, fixed, frozenset(), {}, [None] * len(step.outputs))


@pytest.mark.parametrize("meshes", [2, 3])
def test_a_chain_of_unnamed_work_is_cut_where_it_sends_the_fewest_bytes(meshes: int):
    """One chain from the first mesh to each other mesh, of arrays of any size."""
    rng = random.Random(0)
    for _ in range(10):
        sizes = [[rng.choice([32, 64, 128, 256]) for _ in range(5)] for _ in range(meshes - 1)]

        def fun(x: jax.Array, sizes: list[list[int]] = sizes) -> Any:
            first = mpmd.named_tensor(x + 1, "m0")
            results = []
            for mesh, chain in enumerate(sizes, 1):
                value = first
                for size in (*chain, 1024):
                    value = jax.lax.pad(value, jnp.float32(0), [(0, size - value.size, 0)])
                results.append(mpmd.named_tensor(value, f"m{mesh}"))
            return results

        assert placed(step_of(fun, jnp.ones(1024))).transferred == 4 * sum(map(min, sizes))


def ranks_of(step: PlacedNodes, name: str) -> list[int]:
    return [n.rank for n in step.nodes if n.origin is None and n.equations[0].name == name]


def test_a_smaller_result_is_sent_in_place_of_a_larger_operand():
    def fun(x):
        a = mpmd.named_computation(lambda x: jnp.outer(x, x), name="m0")(x)
        small = jnp.sum(a, axis=0)  # between the two meshes
        return mpmd.named_computation(lambda s: s * 2, name="m1")(small)

    lowered = mpmd.jit(fun, config(topology(1, 1), {"m0": "m0", "m1": "m1"})).lower(jnp.ones(100))
    assert lowered.transferred_bytes == 400
    assert ranks_of(lowered.built.placed, "reduce_sum") == [0]


def test_a_smaller_operand_is_sent_in_place_of_a_larger_result():
    def fun(x):
        a = mpmd.named_computation(lambda x: x + 1, name="m0")(x)
        large = jnp.outer(a, jnp.arange(50.0))
        return mpmd.named_computation(jnp.sum, name="m1")(large)

    lowered = mpmd.jit(fun, config(topology(1, 1), {"m0": "m0", "m1": "m1"})).lower(jnp.ones(100))
    assert lowered.transferred_bytes == 400


def test_training_sends_activations_alone():
    """Losses, accumulation and updates go where their operands are: per boundary and microbatch, one array each way."""
    ws, xs = weights(4), batches(3)
    lowered = mpmd.jit(accumulate, config(topology(1, 1), in_runs(4, 2), "ONE_FWD_ONE_BWD")).lower(ws, xs)
    assert lowered.transferred_bytes == 2 * 3 * xs[0].nbytes
    assert lowered.function_mesh_assignment.output_meshes == ("m1", ["m0", "m0", "m1", "m1"])


def test_scalars_and_constants_are_made_where_they_are_read():
    def fun(count, x):
        scale = 1.0 / (count + 1)
        mask = jnp.tril(jnp.ones((64, 64)))
        a = mpmd.named_computation(lambda x: x @ mask * scale, name="m0")(x)
        b = mpmd.named_computation(lambda a: a @ mask * scale, name="m1")(a)
        return b, count + 1

    x = jnp.ones((2, 64))
    lowered = mpmd.jit(fun, config(topology(1, 1), {"m0": "m0", "m1": "m1"})).lower(3, x)
    # The activation, and what is not constant at all: the counter's four bytes. (The mask is computed from an iota,
    # by nodes that read each other; it is sent once.)
    assert lowered.transferred_bytes <= x.nbytes + 4 + 64 * 64 * 4
    assert lowered.function_mesh_assignment.output_meshes == ("m1", "m0")
