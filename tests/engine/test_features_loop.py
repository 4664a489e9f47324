"""What a loop may hold beside a plain loss: carries, other reductions, several loops, unusual models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, AddOp, Concat, Last, Max, treduce, treduce_i
from jaxpp_flax.schedules import GPipe, Std1F1B, ZeroBubble
from tests.engine.toys import chain, chain_loss, forward, mesh_of, same_as_plain
from tests.helpers import DIM, batch_of, slow, tree_allclose

grad = jax.value_and_grad


# --- the carry ---------------------------------------------------------------------------------------------------


def normalized_loss(params: Any, means: Any, mb: Any) -> tuple[jax.Array, Any]:
    """Every layer subtracts a running mean of its input and updates it, as BatchNorm does."""
    x, new = mb["x"], []
    for i, (p, mean) in enumerate(zip(params, means, strict=True)):
        if i:
            x = mark_stage_end(x)
        new.append(0.9 * mean + 0.1 * x.mean(0))
        x = jnp.tanh((x - jax.lax.stop_gradient(new[-1])) @ p["w"])
    return jnp.mean((x - mb["y"]) ** 2), new


@pytest.mark.parametrize("schedule", [slow(Std1F1B(3)), slow(ZeroBubble(3)), ZeroBubble(2)], ids=str)
def test_running_statistics_are_those_of_the_plain_loop(schedule: Any):
    def step(params: Any, means: Any, batch: Any) -> Any:
        def body(means: Any, mb: Any) -> Any:
            (loss, means), grads = grad(normalized_loss, has_aux=True)(params, means, mb)
            return means, (loss, grads)

        return treduce(body, batch, schedule, init=means)

    stages = schedule.num_stages
    means, _ = same_as_plain(step, stages, chain(stages), [jnp.zeros(DIM)] * stages, batch_of(4))
    assert [m.mpmd_idxs for m in means] == [(stage,) for stage in range(stages)]  # each on its own rank
    assert all(np.abs(np.asarray(m)).max() > 0 for m in means)


def test_a_counter_read_by_all_stages_is_kept_by_each_of_them():
    def step(params: Any, count: Any, batch: Any) -> Any:
        def body(count: Any, mb: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                x = mb["x"]
                for i, p in enumerate(params):
                    if i:
                        x = mark_stage_end(x)
                    x = jnp.tanh(x @ p["w"]) * (1 + (count + i) % 3)
                return jnp.mean((x - mb["y"]) ** 2)

            return count + 10, grad(loss)(params)

        return treduce(body, batch, Std1F1B(2), init=count)

    count, _ = same_as_plain(step, 2, chain(2), jnp.int32(7), batch_of(4))
    assert int(count) == 7 + 4 * 10


def test_a_metric_in_the_carry_and_an_unread_leaf():
    def step(params: Any, carry: Any, batch: Any) -> Any:
        def body(carry: Any, mb: Any) -> Any:
            loss, grads = grad(chain_loss)(params, mb)
            return {"best": jnp.minimum(carry["best"], loss), "unread": carry["unread"]}, grads

        return treduce(body, batch, Std1F1B(2), operation=Add, init=carry)

    carry = {"best": jnp.float32(jnp.inf), "unread": jnp.arange(3.0)}
    carry, _ = same_as_plain(step, 2, chain(2), carry, batch_of(3))
    assert np.isfinite(float(carry["best"]))


# --- reductions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decayed:
    """A user's reduction that depends on the order and on the index."""

    rate: float

    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(value.shape, num_microbatches, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return self.rate * state + value * (1 + index)


def test_every_reduction():
    """Of floating, whole and boolean numbers."""

    def step(params: Any, batch: Any) -> Any:
        def body(mb: Any) -> Any:
            def loss(params: Any) -> Any:
                x = forward(params, mb["x"])
                return jnp.mean((x - mb["y"]) ** 2), x

            (value, x), grads = grad(loss, has_aux=True)(params)
            whole = {"count": (x > 0).sum(), "where": jnp.argmax(x, -1), "any": x.max() > 0.5, "end": x.min() < -2.0}
            return grads, {"max": x, "last": x, "concat": x, "user": value, "biggest": grads} | whole

        operation = {"max": Max, "last": Last, "concat": Concat(axis=1), "user": Decayed(0.5), "biggest": Max}
        whole = {"count": Add, "where": Max, "any": Max, "end": Last}
        return treduce(body, batch, Std1F1B(2), operation=(Add, operation | whole))

    batch = batch_of(3)
    _, results = same_as_plain(step, 2, chain(2), batch)
    assert results["concat"].shape == (batch["x"].shape[1], 3, DIM)


class Squares(AddOp):
    """A user's reduction that starts as a sum does and is none: the squares of parts do not add up to a square."""

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return state + value**2


def test_a_kind_of_sum_that_is_none():
    """The gradient of a shared block is made in two stages."""

    def step(params: Any, batch: Any) -> Any:
        return treduce(
            lambda mb: jax.grad(lambda p: chain_loss([p] * 2, mb))(params), batch, Std1F1B(2), operation=Squares()
        )

    same_as_plain(step, 2, chain(1)[0], batch_of(3))


def test_treduce_i_indexes_what_it_likes():
    def step(params: Any, data: Any) -> Any:
        def body(i: jax.Array) -> Any:
            mb = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * 4, 4), data)
            return grad(chain_loss)(params, mb)

        return treduce_i(body, 4, Std1F1B(2))

    same_as_plain(step, 2, chain(2), jax.tree.map(lambda x: x[0], batch_of(1)))


def test_microbatches_along_another_axis():
    def step(params: Any, batch: Any) -> Any:
        return treduce(lambda mb: chain_loss(params, mb), batch, GPipe(2), axis=1, operation=Concat())

    same_as_plain(step, 2, chain(2), jax.tree.map(lambda x: x.swapaxes(0, 1), batch_of(3)))


# --- models ------------------------------------------------------------------------------------------------------


def test_frozen_first_stage_and_frozen_last_stage():
    """No gradient flows to the first; the last has none of its own: both still run."""

    def step(params: Any, batch: Any) -> Any:
        def loss(middle: Any, mb: Any) -> jax.Array:
            return chain_loss([params[0], middle, params[2]], mb)

        return treduce(lambda mb: grad(loss)(params[1], mb), batch, Std1F1B(3))

    same_as_plain(step, 3, chain(3), batch_of(4))


class Scaled(type(Add)):
    """Two of these compare equal, whatever their scale: the comparison is that of `Add`."""

    def __init__(self, scale: float) -> None:
        object.__setattr__(self, "scale", scale)

    def update(self, state: Any, value: Any, index: Any) -> Any:
        return state + self.scale * value


@dataclass(frozen=True)
class Begins:
    """A reduction whose accumulator begins with a Python number: the first value decides the type."""

    number: Any
    how: Any

    def state(self, num_microbatches: int, value: Any) -> Any:
        return jnp.full(value.shape, self.number)

    def update(self, state: Any, value: Any, index: Any) -> Any:
        return self.how(state, value)


def test_operations_that_compare_equal_and_the_type_of_an_accumulator():
    """Each stays an operation of its own, and the type is that of a loop in JAX, of a weakly typed value too."""
    narrow = np.dtype(jnp.bfloat16).type(0)
    operations = (Scaled(2.0), Scaled(3.0), Begins(-np.inf, jnp.maximum), Begins(0, jnp.add), Begins(narrow, jnp.add))
    assert operations[0] == operations[1]

    def step(batch: Any) -> Any:
        def body(mb: Any) -> Any:
            y = mark_stage_end(jnp.tanh(mb["x"]))
            return y.sum(), (y + 1).sum(), y.astype(jnp.bfloat16), y, jnp.where(y > 0, 1.25, 0.3)

        reduced = treduce(body, batch, Std1F1B(2), operation=operations)
        return reduced, jax.tree.map(lambda x: x * 2 + 1, reduced)

    same_as_plain(step, 2, batch_of(4))  # dtypes too


def test_an_ordered_effect_of_an_operation_is_refused():
    def told(state: Any, value: Any) -> Any:
        jax.debug.print("{}", value.sum(), ordered=True)
        return state + value

    def step(batch: Any) -> Any:
        return treduce(lambda mb: mark_stage_end(mb["x"]) * 2, batch, Std1F1B(2), operation=Begins(0.0, told))

    with pytest.raises(ValueError, match="ordered=True"):
        mpmd_jit_with_loop(step, mpmd_mesh=mesh_of(2))(batch_of(4))


def test_a_value_that_is_returned_twice_is_two_arrays():
    def step(state: Any, batch: Any) -> Any:
        weights, _ = state
        _, grads = treduce(lambda mb: grad(chain_loss)(weights, mb), batch, Std1F1B(2))
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return (new, new), grads, grads

    pipelined, plain = mpmd_jit_with_loop(step, mpmd_mesh=mesh_of(2), donate_argnums=0), jax.jit(step)
    state, expected, kept = (chain(2), chain(2)), (chain(2), chain(2)), []
    for _ in range(2):
        state, *kept = pipelined(state, batch_of(4))
        expected, *_ = plain(expected, batch_of(4))
    pipelined((state[0], chain(2)), batch_of(4))  # takes the first one
    tree_allclose(state[1], expected[1], rtol=1e-6)
    tree_allclose(kept[0], kept[1], rtol=0)
