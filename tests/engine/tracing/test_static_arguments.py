"""Static arguments: the type, and the sign of a zero, belong to the key, at any depth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.tracing.static_arguments import StaticArgument
from tests.engine.toys import chain, forward, mesh_of
from tests.helpers import batch_of


@dataclass(frozen=True)
class Options:
    """What a step may take as one static argument."""

    scale: Any


PAIRS = [(2, 2.0), (1, True), (0.0, False), (0.0, -0.0), (0j, -0j)]
WITHIN: dict[str, Any] = {
    "bare": lambda x: x,
    "tuple": lambda x: (x,),
    "nested": lambda x: ("a", (1, (x,))),
    "set": lambda x: frozenset([x]),
    "dataclass": Options,
    "mapping": lambda x: FrozenDict(scale=x),
    "partial": lambda x: partial(Options, scale=x),
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_equal_values_of_other_types_are_other_arguments(pair: tuple[Any, Any], within: Any):
    first, second = (StaticArgument.of(within(value)) for value in pair)
    assert first != second
    if not isinstance(within(1), partial):  # a partial is equal to itself alone
        assert first == StaticArgument.of(within(pair[0]))
        assert hash(first) == hash(StaticArgument.of(within(pair[0])))


def test_a_class_decides_for_itself_what_is_equal():
    class Schedule:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Schedule) and self.rate == other.rate

        def __hash__(self) -> int:
            return hash(self.rate)

    assert StaticArgument.of(Schedule(1)) == StaticArgument.of(Schedule(1.0))


@pytest.mark.parametrize("passed", ["position", "name"])
def test_every_type_runs_its_own_program(passed: str):
    """Against a fresh `jax.jit` for each value: one that has seen `(2,)` runs its program for `(2.0,)`."""
    statics = [2, 2.0, True, 1, 0.0, False, -0.0, (2,), (2.0,), Options(1), Options(True), 2]

    def step(params: Any, x: jax.Array, static: Any) -> Any:
        (value,) = static if isinstance(static, tuple) else (getattr(static, "scale", static),)
        # The sign of a zero shows in its reciprocal.
        return forward(params, x), jnp.asarray(value), x[0, 0] * 0 + np.divide(1.0, np.float32(value))

    params, x = chain(2), batch_of(1)["x"][0]
    pipelined = mpmd_jit(step, mesh_of(2), static_argnums=2)
    with np.errstate(divide="ignore"):
        for static in statics:
            actual = pipelined(params, x, static=static) if passed == "name" else pipelined(params, x, static)
            expected = jax.jit(partial(step, static=static))(params, x)
            for got, want in zip(actual, expected, strict=True):
                assert got.dtype == want.dtype, static
                np.testing.assert_allclose(
                    np.asarray(got), np.asarray(want), rtol=1e-6
                )  # one product, summed otherwise
    assert len(pipelined._cache) == len(statics) - 1
