"""Markers that cut together: those of passes beside one another, through the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from tests.engine.toys import opened
from tests.helpers import DIM, ROWS

X, W = np.ones((ROWS, DIM), np.float32), np.ones((DIM, DIM), np.float32)


def block(w: Any, x: Any, name: str | None = "Block", closes_block: bool = True) -> Any:
    return mark_stage_end(jnp.tanh(x @ w), name, closes_block=closes_block)


def body_of(fun: Callable[..., Any]) -> LoopBody:
    """The body of `fun(v, w, x)`, differentiated by v and w; x is the index's part of the data."""

    def body(v: Any, w: Any, data: Any, index: Any) -> Any:
        return jax.grad(fun, (0, 1))(v, w, jax.lax.dynamic_slice(data, (index, 0, 0), (1, *X.shape))[0])

    graph, _ = from_jaxpr(jax.make_jaxpr(body)(W, W, X[None], np.int32(0)))
    return opened(inline(graph), 3)


def beside(v: Any, w: Any, x: Any) -> Any:
    return (block(w, block(v, x)) * block(w, block(v, 2 * x))).sum()


def one_is_behind_the_other(v: Any, w: Any, x: Any) -> Any:
    x = block(w, block(v, x))
    return block(w, block(v, x)).sum()


def other_weights(v: Any, w: Any, x: Any) -> Any:
    return (block(v, x) * block(w, x)).sum()


def no_blocks(v: Any, w: Any, x: Any) -> Any:
    return (block(v, x, None, False) * block(v, 2 * x, None, False) + w.sum()).sum()


def other_names(v: Any, w: Any, x: Any) -> Any:
    return (block(v, x, "one") * block(v, x, "other") + w.sum()).sum()


@pytest.mark.parametrize(
    ("fun", "sizes"),
    [
        (beside, [2, 2]), (one_is_behind_the_other, [1] * 3), (other_weights, [1, 1]), (no_blocks, [1, 1]),
        (other_names, [1, 1]),
    ],
)  # fmt: skip
def test_passes_beside_one_another_cut_together(fun: Callable[..., Any], sizes: list[int]):
    body = body_of(fun)
    assert [len(group) for group in body.cut_groups] == sizes
    assert len(body.marks) == len(sizes)


def test_both_passes_go_through_the_same_stages_forward_and_backward():
    body = body_of(beside)
    labels = label(body, [0])
    labels.verify()
    phases = [labels.phase[e] for e in labels.body.equations if e.name == "dot_general"]
    # Of each pass: a product on each stage; then the gradients of w and of its input, and that of v.
    assert sorted(phases) == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
