"""Results of a loop that nothing reads are not made; no two results of a step are one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.passes.normalise_results import normalise_results
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Equation, Graph, from_jaxpr
from jaxpp_flax.engine.tracing.treduce import Add, treduce, treduce_p
from tests.engine.toys import chain, count, gradients
from tests.helpers import batch_of

PARAMS, BATCH = chain(2), batch_of(2)


def graph_of(step: Any, *args: Any) -> Graph:
    graph, _ = from_jaxpr(jax.jit(step).trace(*args).jaxpr)
    return inline(graph, flatten=True)


def loop_in(graph: Graph) -> Equation:
    (loop,) = [e for e in graph.equations if e.primitive is treduce_p]
    return loop


def test_a_gradient_that_nothing_reads():
    """The first layer's weight is frozen: its gradient's product goes, and that of the layer behind stays."""

    def step(params: Any, batch: Any) -> Any:
        losses, grads = gradients(None)(params, batch)
        return losses, grads[1]

    graph = graph_of(step, PARAMS, BATCH)
    kept = normalise_results(graph)
    kept.verify()
    before, after = loop_in(graph), loop_in(kept)
    assert len(before.outputs) == 5
    assert len(after.outputs) == len(after.params["operations"]) == len(after.params["body"].outputs) == 3
    # Two forward, and backward one for each weight and one for the activation between; frozen, two of these go.
    assert (count(before.params["body"], "dot_general"), count(after.params["body"], "dot_general")) == (5, 3)


def test_a_loop_that_nothing_reads_goes():
    def step(params: Any, batch: Any) -> Any:
        gradients(None)(params, batch)
        return params[0]["w"] * 2

    assert [e.name for e in normalise_results(graph_of(step, PARAMS, BATCH)).equations] == ["mul"]


def test_the_carry_stays():
    """The next microbatch reads it, whoever reads it in the end."""

    def step(batch: Any) -> Any:
        def body(carry: Any, mb: Any) -> Any:
            return carry * 0.5 + mb["x"].mean(), (mb["x"].sum() * carry, mb["y"].max())

        return treduce(body, batch, operation=Add, init=jnp.float32(0))[1][0]

    graph = graph_of(step, BATCH)
    kept = normalise_results(graph)
    assert (len(loop_in(graph).outputs), len(loop_in(kept).outputs)) == (3, 2)
    assert loop_in(kept).params["num_carry"] == 1


def test_side_effects_stay():
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum())
        return x

    graph = graph_of(step, np.ones(3, np.float32))
    assert normalise_results(graph).equations == graph.equations


def test_a_value_that_is_returned_twice_is_copied_once():
    """Arguments are the caller's, and literals no arrays: both stay as they are."""

    def step(x: jax.Array) -> Any:
        y = x * 2
        return x, y, y, x, 1.0

    graph = graph_of(step, np.ones(3, np.float32))
    made = normalise_results(graph)
    made.verify()
    assert [e.name for e in made.equations] == ["mul", "copy"]
    assert made.outputs[0] is made.outputs[3] is graph.inputs[0]
    assert made.outputs[1] is not made.outputs[2]
