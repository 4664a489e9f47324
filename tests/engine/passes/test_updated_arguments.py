"""Which argument a loop's accumulator updates: its sharding is the accumulator's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, chain, gradients
from tests.helpers import ROWS, batch_of

DIM = 12  # unlike ROWS


def relatives(step: Any, *args: Any) -> dict[tuple[int, ...], list[int | None]]:
    """The argument's position for each accumulator, by shape."""
    (loop,) = built(step, 2, *args).loops
    found: dict[tuple[int, ...], list[int | None]] = {}
    for value, like in zip(loop.accumulator_results, loop.like, strict=True):
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
