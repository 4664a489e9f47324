"""Unnamed work goes where the fewest bytes are transferred: compared with every placement there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax import mpmd
from jaxpp_flax.engine.tracing.ir import Value, from_jaxpr
from jaxpp_flax.mpmd.partitioning.infer import Placement, infer
from jaxpp_flax.mpmd.partitioning.nodes import Step, nodes_of
from tests.helpers import slow
from tests.mpmd.programs import accumulate, batches, config, in_runs, topology, weights


def random_step(seed: int, unnamed: int, meshes: int) -> Step:
    """A few large arrays of different sizes, some made by names; everything else may go anywhere."""
    rng = random.Random(seed)

    def fun(*arguments):
        values = list(arguments)
        for mesh in range(meshes):
            values.append(mpmd.named_tensor(values[mesh] + 1.0, f"m{mesh}"))
        for _ in range(unnamed):
            a, b = rng.sample(values, 2)
            size = rng.choice([32, 64, 128])
            values.append(
                jnp.resize(a, (size,))[:size] * b.mean() if rng.random() < 0.3 else jnp.outer(a[:8], b[:8]).ravel()
            )
        return [mpmd.named_tensor(values[-1 - mesh], f"m{mesh}") for mesh in range(min(meshes, unnamed))]

    arguments = [jnp.ones(rng.choice([32, 64, 128])) for _ in range(meshes + 1)]
    graph, _ = from_jaxpr(jax.jit(fun).trace(*arguments).jaxpr)
    return nodes_of(graph)


def bytes_sent(step: Step, ranks: dict, copied: set) -> int:
    """The cost of a placement, counted anew: a value is sent once to each mesh that reads it and does not make it."""
    maker = {v: n for n in step.nodes for v in n.outputs}
    readers: dict[Value, set[int]] = {}
    for node in step.nodes:
        for value in node.inputs:
            readers.setdefault(value, set()).add(ranks[node])
    total = 0
    for value, found in readers.items():
        node = maker.get(value)
        if node in copied:
            continue
        total += value.nbytes * (len(found - {ranks[node]}) if node is not None else len(found) - 1)
    return total


@pytest.mark.parametrize("meshes", [2, 3])
@pytest.mark.parametrize("seed", [*range(2), *map(slow, range(2, 12))])
def test_no_placement_sends_fewer_bytes(seed: int, meshes: int):
    step = random_step(seed, unnamed=2, meshes=meshes)
    fixed = {n: int(n.origin.name[1:]) for n in step.nodes if n.origin is not None}
    found = infer(step, fixed, frozenset(), {}, [None] * len(step.outputs))
    free = [
        n for n in step.nodes if n not in fixed and any(v.nbytes > 64 for v in (*n.inputs, *n.outputs)) and n.inputs
    ]
    rest = {n: found.nodes[n][0] for n in step.nodes if n not in free}
    copied = {n for n in step.nodes if not n.inputs}
    ours = bytes_sent(step, {n: found.nodes[n][0] for n in step.nodes}, copied)
    if meshes ** len(free) > 30_000:
        free = free[-9:]
        rest = {n: found.nodes[n][0] for n in step.nodes if n not in free}
    best = min(
        bytes_sent(step, {**rest, **dict(zip(free, ranks, strict=True))}, copied)
        for ranks in itertools.product(range(meshes), repeat=len(free))
    )
    assert ours == best
    assert found.transferred == ours


def ranks_of(placement: Placement, step: Step, name: str) -> list[Sequence[int]]:
    return [placement.nodes[n] for n in step.nodes if n.origin is None and n.equations[0].name == name]


def test_a_smaller_result_is_sent_in_place_of_a_larger_operand():
    def fun(x):
        a = mpmd.named_computation(lambda x: jnp.outer(x, x), name="m0")(x)
        small = jnp.sum(a, axis=0)  # between the two meshes
        return mpmd.named_computation(lambda s: s * 2, name="m1")(small)

    lowered = mpmd.jit(fun, config(topology(1, 1), {"m0": "m0", "m1": "m1"})).lower(jnp.ones(100))
    assert lowered.transferred_bytes == 400
    [ranks] = ranks_of(lowered.built.placement, lowered.built.step, "reduce_sum")
    assert ranks == (0,)


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
