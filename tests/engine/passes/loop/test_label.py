"""Labels: which phase runs each equation, and what every task may compute for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.passes.loop.loop import Labels
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import VerificationError, from_jaxpr
from jaxpp_flax.engine.tracing.markers import Mark, mark_stage_end
from tests.engine.toys import opened
from tests.helpers import DIM, ROWS

X = np.ones((ROWS, DIM), np.float32)
W = np.ones((DIM, DIM), np.float32)


def labels_of(fun: Callable[..., Any], *operands: Any, carry: Sequence[Any] = (), cuts: Any = None) -> Labels:
    """Label `fun(*operands, index, *carry)`."""
    graph, consts = from_jaxpr(jax.make_jaxpr(fun)(*operands, np.int32(0), *carry))
    assert not consts
    body = opened(inline(graph), len(operands), len(carry))
    labels = label(body, range(len(body.marks)) if cuts is None else cuts)
    labels.verify()
    return labels


def phases(labels: Labels, primitive: str) -> list[int]:
    return [labels.phase[e] for e in labels.body.equations if e.name == primitive]


def three_layers(v: Any, w: Any, u: Any, x: Any, index: Any) -> Any:
    x = mark_stage_end(jnp.tanh(x @ v))
    x = mark_stage_end(jnp.tanh(x @ w))
    return (jnp.tanh(x @ u) ** 2).sum()


def test_forward_then_backward_in_mirror_order():
    """Three stages have six phases: 0, 1, 2 forward and 3, 4, 5 back."""
    labels = labels_of(jax.grad(three_layers, argnums=(0, 1, 2)), W, W, W, X)
    assert labels.num_stages == 3
    assert phases(labels, "tanh") == [0, 1, 2]
    # Forward products, then of each stage the weights' gradient and the input's (the first stage has none).
    assert phases(labels, "dot_general") == [0, 1, 2, 3, 3, 4, 4, 5]


def test_marks_that_do_not_cut_are_looked_through():
    labels = labels_of(jax.grad(three_layers, argnums=(0, 1, 2)), W, W, W, X, cuts=[1])
    assert labels.num_stages == 2
    assert phases(labels, "tanh") == [0, 0, 1]
    assert phases(labels, "dot_general") == [0, 0, 1, 2, 2, 3, 3, 3]


def test_find_marks():
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x: mark_stage_end(mark_stage_end(x, "a") + 1, closes_block=True))(X))
    body = opened(inline(graph), 0)
    assert [(m.name, m.closes_block) for m in body.marks] == [("a", False), (None, True)]
    assert all(isinstance(m, Mark) and "test_label.py" in m.where for m in body.marks)
    assert [m.params["name"] for m in body.forward_markers] == ["a", None]


def test_work_on_inputs_alone_is_free():
    """Slices, casts, masks and keys are computed by whoever needs them; matrix products are not."""

    def fun(data: Any, w: Any, index: Any) -> Any:
        x = jax.lax.dynamic_index_in_dim(data, index, keepdims=False)
        mask = jnp.tril(jnp.ones((ROWS, DIM)))
        shared = w @ w
        y = mark_stage_end((x * mask) @ shared)
        return (y * mask) @ shared

    labels = labels_of(fun, np.ones((2, ROWS, DIM), np.float32), W)
    free = {e.name for e in labels.free}
    assert "mul" in free  # of the microbatch's slice and the mask, so these are free too
    assert "dot_general" not in free
    assert phases(labels, "dot_general") == [0, 0, 1]
    assert not set(labels.free) & set(labels.phase)


COSTLY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "approx_top_k": lambda x: jax.lax.approx_max_k(x, DIM)[0],
    "cummin": lambda x: jax.lax.cummin(x, axis=0),
    "pure_callback": lambda x: jax.pure_callback(lambda x: x, x, x),
    "reduce_window_max": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME"),
    "schur": lambda x: jax.lax.linalg.schur(x.T @ x)[0][:1] + x,
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_work_on_inputs_alone_runs_once(name: str):
    """Not in every task that reads it: nothing is known of some of these, and that counts as costly."""

    def fun(v: Any, w: Any, x: Any, index: Any) -> Any:
        y = COSTLY[name](jnp.concatenate([x] * 16))[:ROWS]
        h = mark_stage_end(jnp.tanh(x @ v) + y)
        return (jnp.tanh(h @ w) * y).sum()

    labels = labels_of(jax.grad(fun, argnums=(0, 1)), W, W, X)
    assert phases(labels, name) == [0]
    assert name not in {e.name for e in labels.free}


def test_unanchored_work_goes_to_its_first_user():
    labels = labels_of(lambda w, x, i: mark_stage_end(mark_stage_end(x) * 2) @ (w @ w), W, X)
    assert phases(labels, "dot_general") == [2, 2]


def test_a_skip_is_made_where_its_operands_are():
    def fun(w: Any, x: Any, index: Any) -> Any:
        first = jnp.tanh(x @ w)
        x = mark_stage_end(first)
        x = mark_stage_end(jnp.sin(x @ w))
        return x + jnp.cos(first)

    labels = labels_of(fun, W, X)
    assert (phases(labels, "tanh"), phases(labels, "sin")) == ([0], [1])
    assert phases(labels, "cos") in ([0], [2])


def test_the_gradient_of_a_middle_stages_auxiliary_loss():
    """Its cotangent is a bare scalar: it belongs to the stage whose residual it reads."""

    def fun(v: Any, w: Any, u: Any, x: Any, index: Any) -> Any:
        x = mark_stage_end(jnp.tanh(x @ v))
        x = jnp.tanh(x @ w)
        aux = (jnp.exp(x) ** 2).mean()
        x = mark_stage_end(x)
        return (x @ u).sum() + aux

    labels = labels_of(jax.grad(fun, argnums=(0, 1, 2)), W, W, W, X)
    assert phases(labels, "exp") == [1]
    transposed = [e for e in labels.body.equations if e.transposed and e.name == "dot_general"]
    assert [labels.phase[e] for e in transposed] == sorted(labels.phase[e] for e in transposed)
    exp = next(e for e in labels.body.equations if e.name == "exp")
    readers = [e for e in labels.body.equations if e.transposed and set(exp.outputs) & set(e.inputs)]
    assert readers
    assert {labels.phase[e] for e in readers} == {4}, "the backward of stage 1"


def test_counters_are_kept_by_every_stage():
    def fun(x: Any, index: Any, count: Any, mean: Any) -> Any:
        y = mark_stage_end(x * count)
        return count + 1, mean + (y @ jnp.ones((DIM, DIM))).sum(0), y

    labels = labels_of(fun, X, carry=[np.int32(0), np.zeros(DIM, np.float32)])
    assert labels.counters == {0}


def test_verify_finds_a_label_before_its_operand():
    labels = labels_of(jax.grad(three_layers, argnums=(0, 1, 2)), W, W, W, X)
    last = max(labels.phase, key=lambda e: labels.phase[e])
    with pytest.raises(VerificationError, match="runs before its operand"):
        replace(labels, phase={**labels.phase, last: 0}).verify()
    missing = dict(labels.phase)
    del missing[last]
    with pytest.raises(VerificationError, match="has no label"):
        replace(labels, phase=missing).verify()


def test_a_collective_is_not_free_however_small():
    """Every task would wait for it again."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    labels = labels_of(lambda x, index: mark_stage_end(total(x)) * 2, np.ones(8, np.float32))
    assert phases(labels, "shard_map") == [0]
