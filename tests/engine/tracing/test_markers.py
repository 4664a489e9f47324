"""Markers: the identity everywhere, a cut in a trace, mirrored by the backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.tracing.ir import Equation, from_jaxpr
from jaxpp_flax.engine.tracing.markers import BACKWARD, FORWARD, TANGENT, mark_stage_end, marker_p, pipeline_enter_stage

X = np.arange(4, dtype=np.float32)


def markers_of(fun: Any, *args: Any) -> list[Equation]:
    graph, _ = from_jaxpr(jax.make_jaxpr(fun)(*args))
    return [e for e in graph.equations if e.primitive is marker_p]


def test_identity_on_any_tree_and_dtype():
    tree = {
        "f": jnp.asarray(X),
        "i": jnp.int8(3),
        "b": np.array([True]),
        "h": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(1),
        "text": "kept",
        "none": None,
        "number": 3,
    }
    marked = mark_stage_end(tree, "here")
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    assert (marked["text"], marked["none"], marked["number"]) == ("kept", None, 3)
    for name in ("f", "i", "b", "h"):
        np.testing.assert_array_equal(marked[name], tree[name])
        assert marked[name].dtype == tree[name].dtype
    assert (jax.random.key_data(marked["key"]) == jax.random.key_data(tree["key"])).all()


def test_nothing_is_left_of_it_in_the_lowered_program():
    plain = jax.jit(lambda x: jnp.sin(x) + 1).lower(X).as_text()
    marked = jax.jit(lambda x: mark_stage_end(jnp.sin(x)) + 1).lower(X).as_text()
    assert marked == plain


def test_parameters_of_a_mark():
    (mark,) = markers_of(lambda x: mark_stage_end(x, "a", closes_block=True), X)
    assert mark.params["name"] == "a"
    assert mark.params["direction"] == FORWARD
    assert mark.params["closes_block"] is True
    (older,) = markers_of(lambda x: pipeline_enter_stage(x, "b"), X)
    assert (older.params["name"], older.params["closes_block"]) == ("b", False)
    assert older.params["identifier"] != mark.params["identifier"]


def test_the_backward_mirrors_the_forward():
    def loss(x: jax.Array) -> jax.Array:
        x = mark_stage_end(jnp.sin(x), "first")
        return mark_stage_end(jnp.sin(x), "second").sum()

    marks = markers_of(jax.grad(loss), X)
    assert [(m.params["name"], m.params["direction"]) for m in marks] == [
        ("first", FORWARD), ("second", FORWARD), ("second", BACKWARD), ("first", BACKWARD),
    ]  # fmt: skip
    assert marks[0].params["identifier"] == marks[3].params["identifier"]
    np.testing.assert_allclose(
        jax.grad(loss)(X), jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(X), rtol=1e-6
    )  # float32 rounding


def test_only_live_tangents_are_marked():
    """Integers and constants have no cotangent."""

    def loss(x: jax.Array, n: jax.Array) -> jax.Array:
        y, n, mask = mark_stage_end((jnp.sin(x), n + 1, x > 0))
        return jnp.where(mask, y, 0).sum() * n

    forward, backward = markers_of(jax.grad(loss), X, 3)
    assert len(forward.inputs) == 3
    assert len(backward.inputs) == 1
    assert markers_of(jax.grad(lambda x: (mark_stage_end(3.0 * jnp.ones(2)) * x).sum()), 1.0)[1:] == []


def test_forward_mode_emits_a_tangent_mark():
    marks = markers_of(lambda x: jax.jvp(lambda y: mark_stage_end(jnp.sin(y)), (x,), (x,)), X)
    assert [m.params["direction"] for m in marks] == [FORWARD, TANGENT]


def test_batching():
    batched = jax.vmap(lambda x, y: mark_stage_end((x, y)), in_axes=(0, None))
    first, second = batched(X, X)
    np.testing.assert_array_equal(first, X)
    assert second.shape == (4, 4)
    assert len(markers_of(batched, X, X)) == 1


@pytest.mark.parametrize("nothing", [None, {}, "text", 3, {"a": 1.5}], ids=repr)
def test_a_mark_of_nothing_is_refused(nothing: Any):
    with pytest.raises(ValueError, match=r"no array to mark \(stage 'here'; it got \w+\).*mark_stage_end\(x\)"):
        mark_stage_end(nothing, "here")
