"""The dtypes in which a sum over the batch may be taken in parts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.analyses.linearity import accumulates, passes_parts, sums_in_parts
from jaxpp_flax.engine.tracing.ir import Equation, Value, from_jaxpr
from jaxpp_flax.engine.tracing.primitives import Linear, Operands


def sum_of(dtype: str, summed_in: str) -> Equation:
    """A product that adds four rows, in a dtype of its own."""
    x = jax.ShapeDtypeStruct((4, 8), dtype)
    add = lambda x: jnp.matmul(jnp.ones(4, dtype), x, preferred_element_type=summed_in)  # noqa: E731
    graph, _ = from_jaxpr(jax.make_jaxpr(add)(x))
    (equation,) = [e for e in graph.equations if e.name == "dot_general"]
    return equation


@pytest.mark.parametrize(
    ("dtype", "summed_in", "in_parts"),
    [
        ("float32", "float32", True),
        ("bfloat16", "bfloat16", True),
        ("bfloat16", "float32", True),
        ("complex64", "complex64", True),
        ("float16", "float16", True),  # the whole sum would pass 65504 as well
        ("float32", "bfloat16", False),  # each part would be rounded
        ("int32", "int32", False),
        ("uint8", "uint8", False),
        ("float8_e4m3fn", "float8_e4m3fn", False),
    ],
)
def test_the_dtypes_of_partial_sums(dtype: str, summed_in: str, in_parts: bool):
    assert sums_in_parts(sum_of(dtype, summed_in)) is in_parts


def test_no_sum_of_half_precision_goes_on_in_parts():
    assert not accumulates(jnp.dtype("float16"))
    assert accumulates(jnp.dtype("bfloat16"))


@pytest.mark.parametrize(
    ("parts", "result", "moved", "multiplied"),
    [
        ("float32", "float32", True, True),
        ("bfloat16", "float32", True, True),
        ("float16", "float16", True, False),  # a multiple of a part may pass 65504 where that of the sum does not
        ("float32", "bfloat16", False, False),
        ("bfloat16", "float16", False, False),  # more digits, but a smaller range
        ("float32", "int32", False, False),
        ("int32", "int32", True, False),
        ("float32", "complex64", True, True),
        ("complex64", "complex64", True, True),
        ("complex64", "complex128", True, True),
        ("complex128", "complex64", False, False),
        ("complex64", "float64", False, False),  # half of it is lost
    ],
)
def test_what_may_be_done_to_partial_sums(parts: str, result: str, moved: bool, multiplied: bool):
    made = Value(jax.core.ShapedArray((8,), jnp.dtype(result)))
    (equation,) = from_jaxpr(jax.make_jaxpr(jnp.negative)(jnp.ones(8)))[0].equations
    equation = replace(equation, outputs=(made,))
    assert passes_parts(equation, Linear(Operands.FIRST, moves=True), jnp.dtype(parts)) is moved
    assert passes_parts(equation, Linear(Operands.FIRST), jnp.dtype(parts)) is multiplied


@pytest.mark.parametrize(("precision", "as_it_is"), [(None, True), ("highest", True), ("BF16_BF16_F32", False)])
def test_an_algorithm_may_round_its_operands_first(precision: str | None, as_it_is: bool):
    product = lambda x: jax.lax.dot(x, x, precision=precision)  # noqa: E731
    (equation,) = from_jaxpr(jax.make_jaxpr(product)(jnp.ones((8, 8))))[0].equations
    assert passes_parts(equation, Linear(Operands.EITHER), jnp.dtype("float32")) is as_it_is
