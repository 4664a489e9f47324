"""Fingerprints: equal for tasks that compute the same, whatever their names; different for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.fingerprint import Fingerprinter
from jaxpp_flax.engine.ir import Graph, from_jaxpr
from jaxpp_flax.schedules import GPipe
from tests.engine.toys import batch_of, chain, gradients, partition_of

X = np.ones((4, 4), np.float32)


def graph_of(fun: Callable[..., Any], *args: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(fun)(*args))[0]


def same(*graphs: Graph) -> bool:
    prints = Fingerprinter()
    return len({prints.graph(g) for g in graphs}) == 1


def by_scan(factor: float, length: int | None = None) -> Callable[..., Any]:
    return lambda x: jax.lax.scan(lambda c, r: (c * factor + r, None), x[0], x[:length])[0]


EQUAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "names": (lambda a: jnp.sin(a) + 1, lambda b: jnp.sin(b) + 1),
    "names of calls": (jax.jit(lambda a: a * 2), jax.jit(lambda other: other * 2)),
    "inner jaxprs": (by_scan(2.0), by_scan(2.0)),
    "custom rules": (lambda x: jax.nn.silu(x), lambda x: jax.nn.silu(x)),
}
DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "primitive": (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
    "literal": (lambda x: x + 1.0, lambda x: x + 2.0),
    "parameter": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "wiring": (lambda x: jnp.sin(x) - jnp.cos(x), lambda x: jnp.cos(x) - jnp.sin(x)),
    "output order": (lambda x: (jnp.sin(x), jnp.cos(x)), lambda x: (jnp.sin(x), jnp.cos(x))[::-1]),
    "literal in an inner jaxpr": (by_scan(2.0), by_scan(3.0)),
    "signed zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "type of a literal": (lambda x: x.astype(jnp.int32) + jnp.int32(1), lambda x: x.astype(jnp.float32) + 1),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_equal(pair: tuple[Any, Any]):
    assert same(*(graph_of(fun, X) for fun in pair))


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_different(pair: tuple[Any, Any]):
    assert not same(*(graph_of(fun, X) for fun in pair))


@pytest.mark.parametrize("other", [X[:2], X.astype(np.int32), X[0]], ids=["shape", "dtype", "rank"])
def test_types_of_the_inputs(other: np.ndarray):
    assert not same(graph_of(lambda x: x + x, X), graph_of(lambda x: x + x, other))


def test_the_order_of_the_inputs():
    assert not same(graph_of(lambda x, y: x - y, X, X), graph_of(lambda x, y: y - x, X, X))


def test_middle_stages_are_equal_and_others_are_not():
    part = partition_of(gradients(GPipe(4)), chain(4), batch_of(2))
    prints = Fingerprinter()
    key = {t.name: prints.graph(t.graph) for t in part.tasks}
    assert key["fwd_1"] == key["fwd_2"]
    assert key["bwd_1"] == key["bwd_2"]
    assert len(set(key.values())) == 6
    again = partition_of(gradients(GPipe(4)), chain(4), batch_of(2))
    assert {t.name: prints.graph(t.graph) for t in again.tasks} == key
