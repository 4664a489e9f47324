"""Which marks cut: by name, evenly, or so that the slowest stage is the fastest possible."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.engine.traced import Marks
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.markers import Mark, mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add
from jaxpp_flax.planning import (
    AssignmentError,
    Plan,
    balanced,
    block_names,
    by_name,
    even,
    segment_names,
    sizes,
)
from jaxpp_flax.planning.predicted.blocks import Blocks
from jaxpp_flax.trainers.stages.assignment import resolve
from tests.engine.toys import opened, opened_loop


def blocks(count):
    return [Mark(f"block_{i}", True, f"model.py:{10 + i}") for i in range(count)]


def bare(count):
    return [Mark(None, False, f"model.py:{10 + i}") for i in range(count)]


@pytest.mark.parametrize(
    ("marks", "num_stages", "cuts"),
    [
        (blocks(8), 1, ()),
        (blocks(8), 4, (1, 3, 5)),
        (blocks(8), 3, (2, 5)),
        (blocks(3), 3, (0, 1)),
        (blocks(2), 3, (0, 1)),  # the last mark cuts only where nothing else is left
        (bare(3), 4, (0, 1, 2)),
        (bare(4), 4, (0, 1, 2)),  # JaxPP's final mark adds no stage
        (bare(7), 4, (1, 3, 5)),
        (bare(1), 1, ()),
        ([], 1, ()),
    ],
)
def test_even(marks, num_stages, cuts):
    assert even()(marks, num_stages) == cuts


def test_even_is_even_for_every_count():
    for count, num_stages in itertools.product(range(1, 30), range(1, 12)):
        if num_stages > count:
            continue
        cuts = even()(blocks(count), num_stages)
        ends = [-1, *cuts, count - 1]
        widths = [b - a for a, b in itertools.pairwise(ends)]
        assert len(widths) == num_stages
        assert sum(widths) == count
        assert max(widths) - min(widths) <= 1


def test_too_few_marks():
    with pytest.raises(AssignmentError) as error:
        even()(blocks(2), 5)
    text = str(error.value)
    assert text.startswith("num_stages=5 needs at least 4 marks, but the function has 2: block_0 (model.py:10), ")
    assert "Wrap more of the model's layers in PipelineStage" in text
    assert "at most num_stages=3" in text
    with pytest.raises(AssignmentError, match=r"needs at least 1 marks, but the function has 0\. "):
        even()([], 2)


def test_sizes():
    assert sizes([3, 2, 3])(blocks(8), 3) == (2, 4)
    assert sizes([3, 2, 4])(bare(8), 3) == (2, 4)
    assert sizes([3, 2, 3])(bare(8), 3) == (2, 4)
    with pytest.raises(AssignmentError, match=r"assignment=\[3, 2\] gives sizes for 2 stages, but num_stages=3"):
        sizes([3, 2])(blocks(5), 3)
    with pytest.raises(AssignmentError, match=r"adds up to 9, but the model has 8 blocks: block_0 \(model.py:10\)"):
        sizes([3, 2, 4])(blocks(8), 3)
    with pytest.raises(AssignmentError, match=r"would leave stage 1 empty \(0 blocks\)"):
        sizes([8, 0])(blocks(8), 2)


def test_by_name():
    marks = [*blocks(4), Mark("head", True, "model.py:30")]
    assert by_name({"block_[01]": 0, "block_*": 1, "head": 2})(marks, 3) == (1, 3)
    assert by_name({"*": 0, "head": 1})(marks, 2) == (3,)
    # Work after the last block may be a stage of its own, also by its name.
    assert by_name({"block_*": 0, "head": 1})(marks, 3) == (3, 4)
    assert by_name({"block_*": 0, "head": 0, "after_head": 1})(marks, 2) == (4,)
    assert by_name({"block_*": 0, "head": 1, "after_head": 1})(marks, 2) == (3,)
    assert by_name({"*": 0, "after_head": 1})(marks, 2) == (4,)


@pytest.mark.parametrize(
    ("mapping", "num_stages", "text"),
    [
        ({"blok_1": 0, "*": 1}, 2, r"names 'blok_1', which matches no block of the model\. Did you mean 'block_1'"),
        ({"block_0": 0}, 2, r"leaves out 'block_1', 'block_2', 'block_3'\. Add these names"),
        ({"block_0": 1, "*": 0}, 2, r"not contiguous: 'block_1' is on stage 0, but 'block_0', .* is on stage 1"),
        ({"block_0": 0, "*": 2}, 3, r"leaves stage 1 of num_stages=3 empty"),
        ({"*": 4}, 3, r"puts '\*' on stage 4; stages are numbered 0 to 2"),
        ({"block_*": 1, "after_block_3": 0}, 2, r"not contiguous: 'after_block_3' is on stage 0, but 'block_3'"),
        ({"*": 0, "after_blok_3": 1}, 2, r"'after_blok_3', which matches no block .* mean 'after_block_3'"),
    ],
)
def test_by_name_refuses(mapping, num_stages, text):
    with pytest.raises(AssignmentError, match=text):
        by_name(mapping)(blocks(4), num_stages)


def test_resolve():
    assert resolve("even")(blocks(4), 2) == resolve("auto")(blocks(4), 2) == (1,)
    assert resolve((1, 3))(blocks(4), 2) == (0,)
    assert resolve(lambda marks, num_stages: (2,))(blocks(4), 2) == (2,)
    with pytest.raises(AssignmentError, match=r"unknown assignment 'evn'\. Did you mean 'even'\? Use 'auto', 'even'"):
        resolve("evn")
    with pytest.raises(TypeError, match=r"assignment is 3 \(int\)"):
        resolve(3)
    with pytest.raises(AssignmentError, match=r"returned \(5,\) for 4 marks and num_stages=2"):
        resolve(lambda marks, num_stages: (5,))(blocks(4), 2)


def test_names_are_distinct():
    marks = [Mark("a", True, ""), Mark("b", True, ""), Mark("a", True, ""), Mark(None, False, "")]
    assert block_names(marks) == ("a_0", "b", "a_1", "mark_3")
    assert segment_names(marks) == ("a_0", "b", "a_1", "mark_3", "after_mark_3")


@st.composite
def models(draw):
    """Marks, named or bare, and a number of stages that they allow."""
    count, named = draw(st.integers(1, 12)), draw(st.booleans())
    marks = blocks(count) if named else bare(count)
    return marks, draw(st.integers(1, count if named else count + 1))


@given(models(), st.data())
def test_each_layer_ends_in_exactly_one_stage(model, data):
    marks, num_stages = model
    stages = sorted(data.draw(st.lists(st.integers(0, num_stages - 1), min_size=len(marks), max_size=len(marks))))
    costs = data.draw(st.lists(st.floats(0, 1e3), min_size=len(marks) + 1, max_size=len(marks) + 1))
    policies = [even(), balanced(costs)]
    names = segment_names(marks)
    if set(stages) == set(range(num_stages)):
        policies += [by_name(dict(zip(names, stages, strict=False)))]
    for policy in policies:
        cuts = policy(marks, num_stages)
        plan = Plan.of(marks, cuts, num_stages)
        assert [block.name for block in plan.blocks] == list(names)  # each once, in order, the tail included
        placed = [block.stage for block in plan.blocks]
        assert placed == sorted(placed)
        assert set(placed) == set(range(num_stages))  # whether or not the counts divide
        assert tuple(plan(marks, num_stages)) == tuple(cuts)  # a plan says again what made it


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


def marks_before(head_width: int) -> Marks:
    """The marks of three blocks, with a head after them."""

    def loss(ws: list[jax.Array], head: jax.Array, x: jax.Array) -> jax.Array:
        for i, w in enumerate(ws):
            x = mark_stage_end(jnp.tanh(x @ w), f"b{i}", closes_block=True)
        return jnp.sum(x @ head)

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
    head, x = jax.ShapeDtypeStruct((8, head_width), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda ws, head, x, index: jax.value_and_grad(loss, (0, 1))(ws, head, x))(
        shapes, head, x, jnp.int32(0)
    )
    body = inline(from_jaxpr(jaxpr)[0])
    operations = (Add,) * len(body.outputs)
    return Marks(opened_loop(opened(body, len(body.inputs) - 1, operations=operations, length=1)))


def test_the_estimate_counts_contractions_and_the_head() -> None:
    marks = marks_before(800)
    found = Blocks.of(marks)
    *blocks, after = [work.total for work in found.work()]
    # Three contractions of the head (forward, and two backward) against two or three of each block.
    assert after > 3 * 2 * 4 * 8 * 800
    assert 2 * 2 * 4 * 8 * 8 < blocks[1] < 0.1 * after
    assert found.work()[1].forward < found.work()[1].backward
    assert balanced()(marks, 2) == (2,)  # the head alone: the last mark cuts
    smaller = marks_before(60)
    assert balanced()(smaller, 2) == (2,)
    assert found.sent == (4 * 8 * 4,) * 3
    # With bytes that count, the whole costs more, and of the blocks' elementwise work more than of their contractions.
    assert all(slow.total > fast.total for slow, fast in zip(found.work(8.0), found.work(), strict=True))
