"""Donated inputs and the outputs that take over their memory: as JAX makes the pairs, and without copies by XLA."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.engine.analyses.donation_pairs import donation_pairs, order_of_outputs
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, tree_allclose

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def graph_of(fun: Any, *args: Any) -> Graph:
    return inline(from_jaxpr(jax.jit(fun).trace(*args).jaxpr)[0], flatten=True)


def adam(grad: Any, mean: Any, square: Any, param: Any) -> Any:
    mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad**2
    return param - mean / (jnp.sqrt(square) + 1e-8), square, mean


def pairs_of_jax(graph: Graph, pairs: dict[int, int]) -> dict[int, int]:
    """The pairs that JAX makes of the graph in our order, as outputs of the graph as it was."""
    order = order_of_outputs(graph, pairs)
    ordered = replace(graph, outputs=tuple(graph.outputs[output] for output in order))
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in graph.inputs]
    text = jax.jit(lambda *xs: ordered.run(*xs), donate_argnums=tuple(pairs), keep_unused=True).lower(*avals).as_text()
    found = re.findall(r"%arg(\d+): [^%]*tf\.aliasing_output = (\d+)", text)
    return {int(position): order[int(output)] for position, output in found}


def test_an_update_is_done_in_place_and_the_gradient_is_left_over():
    graph = graph_of(adam, X, X, X, X)
    pairs = donation_pairs(graph, range(4))
    assert pairs == {1: 2, 2: 1, 3: 0}  # the mean, the square, the parameter
    assert pairs_of_jax(graph, pairs) == pairs


def test_pins_come_first_and_other_types_keep_their_places():
    wide = jax.ShapeDtypeStruct((5,), jnp.float32)
    graph = graph_of(lambda a, b, c: (a + 1, c * 2, b + a), X, X, wide)
    pairs = donation_pairs(graph, range(3), [(0, 1)])
    assert pairs == {0: 2, 1: 0, 2: 1}
    assert order_of_outputs(graph, pairs)[1] == 1
    assert pairs_of_jax(graph, pairs) == pairs


def test_memory_is_used_again_by_an_output_that_reads_something_else():
    graph = graph_of(lambda a, b: (b * 2, jnp.sum(a)), X, X)
    assert donation_pairs(graph, [0]) == {0: 0}
    assert donation_pairs(graph, [0, 1]) == {1: 0}, "an input of the output comes before"


@pytest.mark.parametrize("seed", range(8))
def test_jax_makes_the_pairs(seed: int):
    rng = np.random.default_rng(seed)
    shapes = [(2,), (3,)]
    inputs = [jax.ShapeDtypeStruct(shapes[rng.integers(2)], jnp.float32) for _ in range(8)]
    read = [rng.choice(8, 3) for _ in range(7)]

    def fun(*xs: Any) -> Any:
        return [sum(xs[i].sum() for i in some) * jnp.ones(shapes[i % 2]) for i, some in enumerate(read)]

    graph = graph_of(fun, *inputs)
    donated = [i for i in range(8) if rng.random() < 0.7]
    pairs = donation_pairs(graph, donated)
    assert pairs_of_jax(graph, pairs) == pairs
    assert pairs.keys() <= {*donated}
    assert len({*pairs.values()}) == len(pairs)
    for shape in shapes:  # no memory is left that an output of its type could take
        of_shape = [i for i in donated if inputs[i].shape == shape]
        outputs = [i for i in range(7) if shapes[i % 2] == shape]
        assert sum(i in pairs for i in of_shape) == min(len(of_shape), len(outputs))


def test_xla_copies_nothing_in_an_update():
    tx = optax.adam(1e-3)
    params = chain(2)
    state = params, tx.init(params)

    def step(schedule: Any) -> Any:
        def run(state: Any, batch: Any) -> Any:
            params, opt_state = state
            _, grads = gradients(schedule)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return run

    batch = batch_of(2)
    expected = jax.jit(step(None))(state, batch)
    pipelined = mpmd_jit_with_loop(step(Std1F1B(2)), mesh_of(2), donate_argnums=(0,))
    compiled = pipelined.compile(state, batch)
    tasks = [
        task.as_text()
        for task in compiled.executables.tasks
        if task is not None and "outer" in task.as_text().partition("\n")[0]
    ]
    assert any("sqrt" in text for text in tasks), "no update found"
    assert [line for text in tasks for line in text.splitlines() if " copy(" in line] == []
    # Adam's first step divides by the root of the square: small gradients keep their relative rounding.
    tree_allclose(pipelined(state, batch), expected)
