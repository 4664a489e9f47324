"""Division of a graph around another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.analyses.contained_graphs import Net, divide
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr

W, X = jnp.full((3, 3), 0.5), jnp.arange(3.0)


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(function)(*args))[0]


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def run(parts: tuple[Graph, ...], whole: Graph, *args: Any) -> list[Any]:
    """Run the parts in order, as one function of the whole's inputs."""
    known: dict[Any, Any] = dict(zip(whole.inputs, args, strict=True))
    for part in parts:
        known.update(zip(part.outputs, part.run(*(known[v] for v in part.inputs)), strict=True))
    return [known[v] for v in whole.outputs]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda w, x: layer(w, jnp.sin(x)), [["sin"], ["dot_general", "tanh"]]),
        (lambda w, x: jnp.sin(layer(w, x)), [["dot_general", "tanh"], ["sin"]]),
        (lambda w, x: jnp.sin(layer(w, jnp.cos(x))), [["cos"], ["dot_general", "tanh"], ["sin"]]),
        (lambda w, x: (layer(w, x), jnp.sin(x)), [["sin"], ["dot_general", "tanh"]]),
    ],
)
def test_a_whole_falls_into_what_is_before_the_core_and_after(function: Any, names: Any):
    whole = graph_of(function, W, X)
    found = divide(Net.of(whole), Net.of(graph_of(layer, W, X)), Fingerprinter())
    assert found is not None
    assert [[e.name for e in part.equations] for part in found.parts] == names
    expected = jax.tree.leaves(function(W, X))
    assert all(jnp.array_equal(a, b) for a, b in zip(run(found.parts, whole, W, X), expected, strict=True))


def test_cheap_values_of_the_core_are_computed_again():
    def scaled(w: Any, x: Any) -> Any:
        return layer(jnp.exp(w), x)

    merged = graph_of(lambda w, x: (e := jnp.exp(w)) @ layer(e, x), W, X)
    found = divide(Net.of(merged), Net.of(graph_of(scaled, W, X)), Fingerprinter())
    assert found is not None
    assert found.after is not None
    assert [e.name for e in found.after.equations] == ["exp", "dot_general"]
    (result,) = run(found.parts, merged, W, X)
    assert jnp.array_equal(result, jnp.exp(W) @ scaled(W, X))


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: jnp.sin(x @ w),  # another operation
        lambda w, x: (y := x @ w) + jnp.tanh(y),  # the product is read outside, and is not cheap
        lambda w, x: jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16)),  # other types
        lambda w, x: jnp.tanh(w @ x),  # another dimension of the product
    ],
)
def test_a_whole_without_the_part_is_not_divided(function: Any):
    assert divide(Net.of(graph_of(function, W, X)), Net.of(graph_of(layer, W, X)), Fingerprinter()) is None
