"""Which argument a result updates, and a loop's accumulator, which takes its sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpp_flax.engine.passes import PASSES
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, chain, chain_loss, gradients
from tests.helpers import ROWS, batch_of

DIM = 12  # unlike ROWS


def relatives(step: Any, *args: Any) -> dict[tuple[int, ...], list[int | None]]:
    """The argument's position for each accumulator, by shape."""
    (loop,) = built(step, 2, *args).loops
    found: dict[tuple[int, ...], list[int | None]] = {}
    for value, like in zip(loop.results, loop.like, strict=True):
        found.setdefault(tuple(value.aval.shape), []).append(like)
    return found


def updated(change: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        losses, grads = gradients(Std1F1B(2))(params, batch)
        return change(params, grads), losses

    return step


CHANGES = {
    "sgd": lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * g, p, g),
    "clipped": lambda p, g: optax.apply_updates(
        p, jax.tree.map(lambda u: -u, optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0])
    ),
    "scaled_by_shape": lambda p, g: jax.tree.map(lambda p, g: p - g / jnp.sqrt(jnp.mean(g**2) + 1e-8), p, g),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_finds_its_parameter(name: str):
    assert DIM != ROWS
    params, batch = chain(2, DIM), batch_of(2, dim=DIM)
    found = relatives(updated(CHANGES[name]), params, batch)
    # Arguments in order: b and w of the first layer, then of the second.
    assert sorted(found[DIM,]) == [0, 2]
    assert sorted(found[DIM, DIM]) == [1, 3]
    assert found[2,] == [None], "the losses belong to no argument"


@pytest.mark.parametrize(
    "change", [lambda p, g, mask: p - 0.1 * g * mask, lambda p, g, mask: jnp.where(mask > 0, p - 0.1 * g, p)]
)
def test_a_mask_is_not_what_a_gradient_updates(change: Any):
    params, batch = chain(2, DIM), batch_of(2, dim=DIM)

    def step(mask: Any, params: Any, batch: Any) -> Any:
        losses, grads = gradients(Std1F1B(2))(params, batch)
        return jax.tree.map(change, params, grads, mask), losses

    found = relatives(step, jax.tree.map(jnp.ones_like, params), params, batch)
    assert sorted(found[DIM,]) == [4, 6]
    assert sorted(found[DIM, DIM]) == [5, 7]


def test_a_gradient_that_meets_no_argument():
    found = relatives(gradients(Std1F1B(2)), chain(2, DIM), batch_of(2, dim=DIM))
    assert {like for several in found.values() for like in several} == {None}


CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OPTIMIZERS = {
    "adam": CLIPPED_ADAM,
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
    "multi_steps": optax.MultiSteps(CLIPPED_ADAM, 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(CLIPPED_ADAM, 3),
    "both": optax.MultiSteps(optax.apply_if_finite(CLIPPED_ADAM, 3), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_state_is_paired_leaf_by_leaf(name: str):
    """Parameters, moments and averages have one type, and are made of each other; counters and keys are small."""
    tx = OPTIMIZERS[name]

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, average, key, scale = state
        losses, grads = gradients(Std1F1B(2))(params, batch)
        key, noise = jax.random.split(key)
        grads = jax.tree.map(lambda g: (g + jax.random.uniform(noise) * 1e-3) / scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        finite = jnp.isfinite(optax.tree.norm(grads))
        return (params, opt_state, average, key, jnp.where(finite, scale, scale / 2)), losses

    params = chain(2, DIM)
    state = (params, tx.init(params), params, jax.random.key(0), jnp.float32(8))
    made = built(step, 2, state, batch_of(2, dim=DIM))
    graph, _ = from_jaxpr(jax.jit(step).trace(state, batch_of(2, dim=DIM)).jaxpr)
    lowered = next(s for each, s in PASSES.steps(graph, made.settings) if each.name == "lower_loops")
    leaves = jax.tree.leaves(state)
    *state_updates, losses = lowered.updated
    assert losses is None
    for position, (leaf, found) in enumerate(zip(leaves, state_updates, strict=True)):
        assert found == position or leaf.dtype == bool, (position, found)  # `last_finite` is made of nothing old
    (loop,) = made.loops
    assert sorted(k for k in loop.like if k is not None) == [0, 1, 2, 3], "the parameters, not their moments"


def test_a_tied_gradient_of_several_stages_in_parts():
    """Each of its accumulators takes the sharding of the one parameter."""

    def step(params: Any, batch: Any) -> Any:
        tied = lambda p, mb: chain_loss([p[0], p[0]], mb)  # noqa: E731
        losses, grads = gradients(Std1F1B(2), tied)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    found = relatives(step, chain(1, DIM), batch_of(2, dim=DIM))
    assert (found[DIM,], found[DIM, DIM]) == ([0, 0], [1, 1])
