"""Counts of operations, beside the same counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.analyses.work import count_flops, products

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
PRODUCT, ELEMENTS = 2.0 * 4 * 8 * 8, 4.0 * 8


def looped(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=5)[0]


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (looped(x, w), None), x, length=3)[0]


def chosen(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(True, lambda x: x @ w, jnp.sin, x)


def open_ended(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: True, lambda x: x @ w, x)


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    """A window of 2 over 8 places, from 4 features to 3."""
    return jax.lax.conv_general_dilated(x[None], jnp.ones((3, 4, 2)), (1,), "SAME")


def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each row times the matrix of one of three groups."""
    return jax.lax.ragged_dot(x, jnp.stack([w, w, w]), jnp.asarray([1, 0, 3]))


def grouped_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    """The gradients of the three matrices: of each, from the rows of its group alone."""
    return jax.vjp(lambda w: jax.lax.ragged_dot(x, w, jnp.asarray([1, 0, 3])), jnp.ones((3, 8, 8)))[1](x)[0]


@pytest.mark.parametrize(
    ("function", "flops", "of_products"),
    [
        (lambda x, w: jnp.sin(x @ w), PRODUCT + ELEMENTS, PRODUCT),
        (looped, 5 * (PRODUCT + ELEMENTS), 5 * PRODUCT),
        (nested, 15 * (PRODUCT + ELEMENTS), 15 * PRODUCT),
        (chosen, PRODUCT, PRODUCT),  # the dearer branch
        (open_ended, PRODUCT, PRODUCT),  # one turn
        (convolved, 2.0 * (8 * 3) * (4 * 2) + ELEMENTS + 3 * 4 * 2, 2.0 * (8 * 3) * (4 * 2)),
    ],
)
def test_every_turn_of_a_loop_counts(function: Callable[..., jax.Array], flops: float, of_products: float):
    equations = jax.make_jaxpr(function)(X, W).jaxpr.eqns
    assert count_flops(equations) == pytest.approx(flops, abs=1)  # a condition that is a constant may be an operation
    assert sum(found for *_, found in products(equations)) == of_products


@pytest.mark.parametrize("function", [grouped, grouped_gradient])
def test_a_row_meets_one_matrix_of_a_ragged_product(function: Callable[..., jax.Array]):
    *_, (equation, _, flops) = products(jax.make_jaxpr(function)(X, W).jaxpr.eqns)
    assert (equation.primitive.name, flops) == ("ragged_dot_general", PRODUCT)
