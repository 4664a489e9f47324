"""What is asked of equations of ours and of JAX's: the same answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.analyses.equation_facts import avals_of, place_of
from jaxpp_flax.engine.tracing.ir import from_jaxpr


def test_both_kinds_of_equations_say_the_same():
    jaxpr = jax.make_jaxpr(lambda x: x.argmax(-1))(jnp.ones((2, 3)))
    (theirs,) = jaxpr.jaxpr.eqns
    (ours,) = from_jaxpr(jaxpr)[0].equations
    for equation in (theirs, ours):
        (read,), (made,) = avals_of(equation)
        assert (read.shape, made.shape) == ((2, 3), (2,))
        assert "test_equation_facts.py:" in place_of(equation)
