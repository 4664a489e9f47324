"""What a trace tells of the values that a call writes: on what they depend, and which of them are the values before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.trainers.writes.dependencies import Writes, find_writes

CASES: dict[str, tuple[Callable[[Any, Any, Any], tuple[Any, Any]], Writes]] = {
    # of the states a and b, a parameter w and a microbatch x
    "nothing": (lambda states, w, x: (states, w), Writes()),
    "a count": (lambda states, w, x: ((states[0] + 1, states[1]), w), Writes(carried=(0,))),
    "a sum": (lambda states, w, x: ((states[0] + x, states[1]), w), Writes(carried=(0,))),
    "an average of a parameter": (lambda states, w, x: ((states[0] + w, states[1]), w), Writes(once=(0,))),
    "one that a count scales": (
        lambda states, w, x: ((states[0] * states[1] + w, states[1] + 1), w), Writes(once=(0, 1))
    ),
    "one that a sum scales": (
        lambda states, w, x: ((states[0] * states[1] + w, states[1] + x), w), Writes(carried=(0, 1))
    ),
    "a norm": (lambda states, w, x: (states, w / jnp.abs(w)), Writes(params=(0,))),
    "a norm by a state": (lambda states, w, x: ((w, states[1]), w * states[0]), Writes(once=(0,), params=(0,))),
    "a norm by the microbatch": (lambda states, w, x: (states, w * x), Writes(params=(0,), varying=(0,))),
    "a norm by a sum": (
        lambda states, w, x: ((states[0] + x, states[1]), w * states[0]),
        Writes(carried=(0,), params=(0,), varying=(0,)),
    ),
    "through a call": (
        lambda states, w, x: (jax.jit(lambda *of: of)(*states), jax.jit(jnp.sin)(w)), Writes(params=(0,))
    ),
    "in a scan": (
        lambda states, w, x: (states, jax.lax.scan(lambda carry, w: (carry * w, w / 2), x, w[None])[1][0]),
        Writes(params=(0,)),
    ),
    "from the carry of a scan": (
        lambda states, w, x: (states, jax.lax.scan(lambda carry, w: (carry * w, None), x, w[None])[0]),
        Writes(params=(0,), varying=(0,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_writes(name: str):
    call, expected = CASES[name]

    def run(states: Any, w: Any, x: Any) -> Any:
        after, new = call(states, w, x)
        return after, (new * x).sum(), new

    one = jnp.ones(())
    graph, constants = from_jaxpr(jax.make_jaxpr(run)((one, one), one, one))
    assert find_writes(graph, len(constants), [False, False], 1) == expected
