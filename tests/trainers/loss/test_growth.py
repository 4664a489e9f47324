"""How values grow with the number of examples, and which inputs they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr
from jaxpp_flax.trainers.loss.growth import EXAMPLES, Growth
from jaxpp_flax.trainers.loss.growth_walk import compare_growth
from tests.trainers.loss import test_joined_examples as joined

PER_EXAMPLE, WIDTH = 6, 3


def _graph_of(function: Callable[..., Any], size: int) -> Graph:
    x, mask = np.ones((size, PER_EXAMPLE, WIDTH), np.float32), np.ones((size, PER_EXAMPLE), bool)
    w, state = np.eye(WIDTH, dtype=np.float32), np.zeros(WIDTH, np.float32)
    graph, constants = from_jaxpr(jax.make_jaxpr(function)(x, mask, w, state))
    assert not constants
    return graph


def growth_of(function: Callable[..., Any], sizes: Sequence[int] = (4, 8)) -> Growth:
    """Return the growth of a function `(x, mask, w, state)` of so many examples; it is added onto the state."""
    small, large = (_graph_of(function, size) for size in sizes)
    of_batch = [Growth(reads=frozenset([EXAMPLES]))] * 2
    inputs = [*of_batch, Growth(reads=frozenset(["w"])), Growth(factor=0.0, onto=("state", "add"))]
    (found,) = compare_growth(small, large, inputs).outputs
    return found


def by_scan(x: Any) -> Any:
    return jax.lax.scan(lambda total, row: (total + row.mean(), None), 0.0, x)[0]


def by_while(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]


FACTORS: dict[str, tuple[float | None, Callable[..., Any]]] = {
    "mean": (1, lambda x, m, w, s: (x @ w).mean()),
    "sum": (2, lambda x, m, w, s: ((x @ w) ** 2).sum()),
    "sum over a constant": (2, lambda x, m, w, s: x.sum() / 16),
    "sum over the size": (1, lambda x, m, w, s: x.sum() / len(x)),
    "weights of a mean": (1, lambda x, m, w, s: x.mean((1, 2)) @ jnp.full(len(x), 1 / len(x))),
    "mean of squares by the size": (0.5, lambda x, m, w, s: (x**2).mean() / len(x)),
    "norm of the weights": (1, lambda x, m, w, s: x.mean() + jnp.linalg.norm(w)),
    "one number of a one-hot code": (2, lambda x, m, w, s: jnp.einsum("bt,btw->", (m > 0).astype(x.dtype), x)),
    "chosen examples": (None, lambda x, m, w, s: jnp.einsum("bt,btw->w", (m > 0).astype(x.dtype), x)),
    "count": (2, lambda x, m, w, s: jnp.maximum(m.sum(), 1)),
    "count and a tiny number": (2, lambda x, m, w, s: m.sum() + 1e-6),
    "segments": (2, lambda x, m, w, s: jax.ops.segment_sum(x.mean((1, 2)), m[:, 0].astype(int), 2)[1]),
    "segments of each example": (
        1,
        lambda x, m, w, s: jax.ops.segment_sum(x.mean((1, 2)), jnp.arange(len(x)), len(x)).mean(),
    ),
    "scan": (2, lambda x, m, w, s: by_scan(x)),
    "scan by the size": (1, lambda x, m, w, s: by_scan(x) / len(x)),
    "while": (1, lambda x, m, w, s: by_while(x).mean()),
    "condition": (2, lambda x, m, w, s: jax.lax.cond(m.sum() > 0, lambda: x.sum(), lambda: 0.0)),
    "conditions that differ": (None, lambda x, m, w, s: jax.lax.cond(w[0, 0] > 0, lambda: x.sum(), lambda: x.mean())),
    "padded to one size": (None, lambda x, m, w, s: jnp.pad(x, ((0, 16 - len(x)), (0, 0), (0, 0))).sum() / len(x)),
    "Python loop": (None, lambda x, m, w, s: sum(row.mean() for row in x)),
    "chosen by a one-hot code": (
        None,
        lambda x, m, w, s: (jax.nn.one_hot(jnp.argsort(x[:, 0, 0]), len(x)) @ x[:, 0]).mean(),
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factor(name):
    factor, function = FACTORS[name]
    found = growth_of(function)
    if name == "Python loop":
        assert growth_of(function).reads == {EXAMPLES}
        return
    assert not found.uneven
    assert found.factor == (factor if factor is None else pytest.approx(factor, rel=1e-3))


def test_terms_that_grow_differently():
    """The terms of a mean and of a sum, also below other operations."""
    for function in (
        lambda x, m, w, s: x.mean() + 0.01 * x.sum(),
        lambda x, m, w, s: jnp.where(m.any(), 2 * (jnp.linalg.norm(w) + x.sum()), 0.0),
    ):
        found = growth_of(function)
        assert found.uneven
        assert found.place is not None
        assert found.place.startswith("`add` at ")
        assert __file__ in found.place


def test_means_and_quotients_of_the_search_for_joins():
    """No mean of that test is anything but a mean here; its sums are known, and its quotients found here too."""
    sums = {"sum": 2, "sum of a mask": 2, "two terms": None, "conditions": None}
    for name, function in (joined.MEANS | joined.QUOTIENTS).items():
        if name == "rows by index":  # for one size alone
            continue
        found = growth_of(lambda x, m, w, s, f=function: f(x, m[:, 0].astype(int), m, w, 0.1, jax.random.key(0)))
        assert found.factor == sums.get(name, 1), name
        assert found.uneven == (name == "two terms"), name
        assert (found.divided is not None) == (name in joined.QUOTIENTS), name


DIVIDED: dict[str, Callable[..., Any]] = {
    "segments": lambda x, m, w, s: jnp.divide(
        *(jax.ops.segment_sum(v, m[:, 0].astype(int), 2)[1] for v in (x[:, 0, 0], jnp.ones(len(x))))
    ),
    "scan": lambda x, m, w, s: by_scan(x) / by_scan(m),
    "condition": lambda x, m, w, s: jax.lax.cond(m.any(), lambda: x.sum() / m.sum(), lambda: 0.0),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_quotient_by_a_sum_over_the_examples(name):
    found = growth_of(DIVIDED[name])
    assert found.divided is not None
    assert found.divided.startswith("`div` at ")


def rows_of_a_scan(x: Any, mask: Any, w: Any) -> Any:
    """A loop of which one result depends on the weights, and one does not."""

    def body(carry: Any, row: Any) -> Any:
        total, count = carry
        return (total + (row[0] @ w).sum(), count + row[1].sum()), None

    return jax.lax.scan(body, (0.0, 0), (x, mask))[0]


def test_what_a_value_depends_on():
    for function, reads in (
        (lambda x, m, w, s: ((x @ w) > 0).mean(), {EXAMPLES, "w"}),  # which has no gradient
        (lambda x, m, w, s: rows_of_a_scan(x, m, w)[0], {EXAMPLES, "w"}),
        (lambda x, m, w, s: rows_of_a_scan(x, m, w)[1], {EXAMPLES}),
        (lambda x, m, w, s: jax.lax.optimization_barrier((x @ w, m))[1].sum(), {EXAMPLES}),
        (lambda x, m, w, s: jax.lax.cond(w.sum() > 0, lambda: 1.0, lambda: 2.0), {"w"}),
        (lambda x, m, w, s: jax.lax.while_loop(lambda c: c < w.sum(), lambda c: c + 1, 0.0), {"w"}),
        (lambda x, m, w, s: jax.checkpoint(lambda x, m: (x @ w, m))(x, m)[1].sum(), {EXAMPLES}),
        (lambda x, m, w, s: jnp.float32(len(x)), set()),
        (lambda x, m, w, s: s * 2, {"state"}),
    ):
        assert growth_of(function).reads == reads


ONTO: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sum": (("add", 2), lambda x, m, w, s: s + x.sum((0, 1))),
    "less a sum": (("add", 2), lambda x, m, w, s: s - x.sum((0, 1))),
    "mean": (("add", 1), lambda x, m, w, s: s + x.mean((0, 1))),
    "places": (("add", 2), lambda x, m, w, s: s.at[x.argmax(-1).ravel()].add(1.0)),
    "jit": (("add", 2), lambda x, m, w, s: jax.jit(lambda s: (s + x.sum((0, 1))).astype(jnp.float32))(s)),
    "condition": (("add", 2), lambda x, m, w, s: jax.lax.cond(w[0, 0] > 0, lambda: s + x.sum((0, 1)), lambda: s)),
    "scan": (("add", 2), lambda x, m, w, s: jax.lax.scan(lambda c, row: (c + row[0], None), s, x)[0]),
    "largest": (("max", 1), lambda x, m, w, s: jnp.maximum(s, jnp.abs(x).max((0, 1)))),
    "decay": (None, lambda x, m, w, s: 0.9 * s + x.sum((0, 1))),
    "larger of a mean": (None, lambda x, m, w, s: jnp.maximum(s, x.mean((0, 1)))),
}


@pytest.mark.parametrize("name", ONTO)
def test_what_is_added_onto_an_input(name):
    expected, function = ONTO[name]
    found = growth_of(function)
    if expected is None:
        assert found.onto is None
        assert "state" in found.reads
    else:
        assert (found.onto, found.factor) == (("state", expected[0]), expected[1])
        assert "state" not in found.reads
