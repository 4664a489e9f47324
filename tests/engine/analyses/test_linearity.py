"""The dtypes in which a sum over the batch may be taken in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.analyses.linearity import accumulates, sums_in_parts
from jaxpp_flax.engine.tracing.ir import Equation, from_jaxpr


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
