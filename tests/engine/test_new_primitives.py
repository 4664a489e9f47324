"""Primitives that JAX 0.12 brings, in a pipelined step: collectives in two halves, calls in an order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpp_flax import treduce
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.inline import MarkerPlacementError
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add
from jaxpp_flax.schedules import Std1F1B
from tests.helpers import slow, tree_allclose
from tests.matrix.harness import mesh_of

try:
    from jax.experimental.overlap import program_order
except ImportError:  # JAX 0.10
    program_order = None

WIDTH = 8
PARAMS = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(2)]
BATCH = jax.random.normal(jax.random.key(2), (3, 2, WIDTH))
needs_order = pytest.mark.skipif(program_order is None, reason="jax.experimental.overlap is new in JAX 0.12")


def psum_start(x: jax.Array, axis: str) -> Any:
    """Start a sum over a mesh axis. The halves of collectives have no public name; JAX's own kernels use them."""
    return pytest.importorskip("jax._src.lax.parallel").psum_start(x, axis)


def pipelined(loss: Callable[..., Any]) -> Any:
    def step(params: Any, batch: Any) -> Any:
        return treduce(partial(loss, params), batch, Std1F1B(2))

    return mpmd_jit_with_loop(step, mesh_of(2, data=2), in_specs=(P(), P(None, "data")))


def mapped(first: Callable[..., Any], out_specs: Any, params: Any, x: jax.Array) -> Any:
    return jax.shard_map(first, in_specs=(P("data"), P()), out_specs=out_specs)(x, params[0])


def test_a_collective_starts_and_ends_in_one_task():
    def sums(x: jax.Array, w: jax.Array, *, halves: bool) -> jax.Array:
        h = x @ w
        total = psum_start(h, "data") if halves else jax.lax.psum(h, "data")
        beside = jnp.tanh(h)
        return beside + (total.done() if halves else total)

    def loss(params: Any, x: jax.Array, *, halves: bool) -> Any:
        hidden = mapped(partial(sums, halves=halves), P("data"), params, x)
        loss = jnp.sum((mark_stage_end(hidden) @ params[1]) ** 2)
        return loss, loss

    # JAX has no derivative of the halves.
    halves, whole = (pipelined(partial(loss, halves=halves))(PARAMS, BATCH) for halves in (True, False))
    tree_allclose(halves, whole)


@needs_order  # JAX 0.10 returns no future from a shard_map
@pytest.mark.parametrize("crosses", [True, False])
def test_a_future_outside_of_its_shard_map_is_refused(crosses: bool):
    def loss(params: Any, x: jax.Array) -> Any:
        future = mapped(lambda x, w: psum_start(x @ w, "data"), P(), params, x)
        hidden = mark_stage_end(x @ params[1]) if crosses else mark_stage_end(future.done())
        loss = jnp.sum(hidden) + (jnp.sum(future.done()) if crosses else 0)
        return loss, loss

    with pytest.raises(NotImplementedError, match=r"`shard_map` at .* is not done yet.*`\.done\(\)` inside"):
        pipelined(loss).place(PARAMS, BATCH)


def ordered(enforce: bool, inner: Callable[..., Any], params: Any, x: jax.Array) -> Any:
    hidden = program_order(inner, enforce=enforce)(x, params[0])  # type: ignore[misc]
    return jnp.sum((hidden @ params[1]) ** 2)


def waves(x: jax.Array, w: jax.Array, mark: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return mark(jnp.sin(x @ w)) * jnp.cos(x @ w)


@needs_order
@pytest.mark.parametrize(("enforce", "inside"), [slow(True, False), slow(False, True)])
def test_calls_in_an_order(enforce: bool, inside: bool):
    """A call that keeps no order may hold marks."""

    def inner(x: jax.Array, w: jax.Array) -> jax.Array:
        return waves(x, w, mark_stage_end) if inside else mark_stage_end(waves(x, w, lambda h: h))

    def loss(params: Any, x: jax.Array) -> Any:
        if inside:
            return jax.value_and_grad(partial(ordered, enforce, inner))(params, x)
        outer = lambda params, x: ordered(enforce, lambda x, w: waves(x, w, lambda h: h), params, mark_stage_end(x))  # noqa: E731
        return jax.value_and_grad(outer)(params, x)

    losses, grads = jax.vmap(partial(loss, PARAMS))(BATCH)
    tree_allclose(pipelined(loss)(PARAMS, BATCH), (losses, [g.sum(0) for g in grads]))


@needs_order
def test_a_mark_inside_of_an_order_is_refused():
    def loss(params: Any, x: jax.Array) -> Any:
        loss = ordered(True, partial(waves, mark=mark_stage_end), params, x)
        return loss, loss

    with pytest.raises(MarkerPlacementError, match="inside `program_order`"):
        pipelined(loss).place(PARAMS, BATCH)


@needs_order
@pytest.mark.parametrize("scanned", [False, True])
def test_an_order_outlives_the_rewriting_of_high_level_calls(scanned: bool):
    """JAX forgets an order inside of a jaxpr that says that nothing in it is high."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return program_order(partial(waves, mark=lambda h: h), enforce=True)(jax.checkpoint(jnp.tanh)(x), w)  # type: ignore[misc]

    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, 2)[0] if scanned else layer(x, w)

    graph, _ = from_jaxpr(jax.make_jaxpr(apply)(BATCH[0], PARAMS[0]))
    texts = [jax.jit(f).lower(BATCH[0], PARAMS[0]).as_text() for f in (apply, graph.run)]
    barriers = [text.count("optimization_barrier") for text in texts]
    assert barriers[0] == barriers[1] > 0


@pytest.mark.parametrize(
    ("wrap", "message"),
    [(lambda f: f, r"makes a mutable array \(`new_ref`\)"), (jax.jit, r"makes a mutable array \(`jit`\)")],
)
def test_a_mutable_array_in_the_body_is_refused(wrap: Callable[..., Any], message: str):
    def doubled(x: jax.Array) -> jax.Array:
        reference = jax.new_ref(x)
        reference[...] += x
        return reference[...]

    def loss(params: Any, x: jax.Array) -> Any:
        loss = jnp.sum((mark_stage_end(wrap(doubled)(x @ params[0])) @ params[1]) ** 2)
        return loss, loss

    with pytest.raises(NotImplementedError, match=message):
        pipelined(loss).place(PARAMS, BATCH)


def test_a_mutable_array_around_the_loop_is_refused():
    def step(params: Any, batch: Any) -> Any:
        total = jax.new_ref(jnp.zeros(()))

        def body(x: jax.Array) -> jax.Array:
            loss = jnp.sum(mark_stage_end(x @ params[0]) @ params[1])
            total[...] += loss
            return loss

        return treduce(body, batch, Std1F1B(2), operation=Add), total[...]

    with pytest.raises(NotImplementedError, match=r"reads or writes a mutable array of the step.*`Add`"):
        mpmd_jit_with_loop(step, mesh_of(2)).place(PARAMS, BATCH)
