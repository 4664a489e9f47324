"""Balanced assignments: the least possible slowest stage, whatever the costs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.assignment.policies import AssignmentError, balanced
from jaxpp_flax.engine.blocks import Blocks, Marks
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.markers import Mark, mark_stage_end


def slowest(costs: list[int], cuts: tuple[int, ...]) -> int:
    edges = [0, *(c + 1 for c in cuts), len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 7), st.booleans())
def test_no_other_cuts_are_better(costs: list[int], stages: int, with_tail: bool) -> None:
    stages = min(stages, len(costs))
    marks = [Mark(f"b{i}", True, "m.py:1") for i in range(len(costs) - with_tail)]
    cuts = balanced(costs)(marks, stages)
    assert len(cuts) == stages - 1
    best = min(slowest(costs, c) for c in itertools.combinations(range(len(costs) - 1), stages - 1))
    assert slowest(costs, cuts) == best


def test_costs_of_another_number_of_blocks_are_refused() -> None:
    marks = [Mark(f"b{i}", True, "m.py:1") for i in range(3)]
    with pytest.raises(AssignmentError, match=r"got 2 costs for 3 blocks.*Give one for each block"):
        balanced([1, 2])(marks, 2)
    with pytest.raises(TypeError, match=r"without costs needs the engine's"):
        balanced()(marks, 2)


def test_the_engine_counts_contractions_and_the_head() -> None:
    def loss(ws: list[jax.Array], head: jax.Array, x: jax.Array) -> jax.Array:
        for i, w in enumerate(ws):
            x = mark_stage_end(jnp.tanh(x @ w), f"b{i}", closes_block=True)
        return jnp.sum(x @ head)

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
    head, x = jax.ShapeDtypeStruct((8, 800), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda index, ws, head, x: jax.value_and_grad(loss, (0, 1))(ws, head, x))(
        jnp.int32(0), shapes, head, x
    )
    body = inline(from_jaxpr(jaxpr)[0])
    # What the loss reads counts as a carry here, and nothing comes back from it.
    carries = len(body.inputs) - 1
    marks = Marks(Blocks(LoopBody.of(body, num_consts=0, num_carry=carries, operations=(), length=1), False))
    *blocks, after = [work.total for work in marks.work()]
    # Three contractions of the head (forward, and two backward) against two or three of each block.
    assert after > 3 * 2 * 4 * 8 * 800
    assert 2 * 2 * 4 * 8 * 8 < blocks[1] < 0.1 * after
    assert marks.work()[1].forward < marks.work()[1].backward
    assert balanced()(marks, 2) == (2,)  # the head alone: the last mark cuts
    assert marks.sent == (4 * 8 * 4,) * 3
    # With bytes that count, the whole costs more, and of the blocks' elementwise work more than of their contractions.
    assert all(slow.total > fast.total for slow, fast in zip(marks.work(8.0), marks.work(), strict=True))
