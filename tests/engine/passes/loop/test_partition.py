"""Partition: tasks that together compute the body, each equation once; reductions, remat, split backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.passes.loop.loop import Labels, Partition, verify_effects
from jaxpp_flax.engine.passes.loop.partition import CarryError, partition
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, VerificationError, from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Last, treduce, treduce_i
from jaxpp_flax.schedules.task import TaskKind
from tests.engine.toys import chain, chain_loss, count, gradients, kinds, opened, partition_of
from tests.helpers import DIM, ROWS, batch_of

F, B, I, W, FUSED = TaskKind  # noqa: E741


def chain_partition(num_stages: int, loss: Callable[..., Any] = chain_loss, **options: Any) -> Partition:
    return partition_of(gradients(None, loss), chain(num_stages), batch_of(2), **options)


def dots(part: Partition) -> dict[str, int]:
    return {t.name: count(t.graph, "dot_general") for t in part.tasks}


# --- which tasks there are ---------------------------------------------------------------------------------------


def test_one_forward_and_one_backward_for_each_stage():
    part = chain_partition(3)
    assert kinds(part) == [(0, F), (1, F), (2, F), (2, B), (1, B), (0, B)]
    # Backward: a product for the weights' gradient, and one for the input's, which the first stage does not need.
    assert dots(part) == {"fwd_0": 1, "fwd_1": 1, "fwd_2": 1, "bwd_2": 2, "bwd_1": 2, "bwd_0": 1}


def test_a_fused_last_stage_is_one_task():
    part = chain_partition(3, fuse_last=True)
    assert kinds(part) == [(0, F), (1, F), (2, FUSED), (1, B), (0, B)]
    assert [t.name for t in part.tasks if t.kind is FUSED] == ["fwd_bwd_2"]
    assert dots(part)["fwd_bwd_2"] == 3


def test_split_backward():
    part = chain_partition(3, split_backward=True)
    assert kinds(part) == [(0, F), (1, F), (2, F), (2, I), (2, W), (1, I), (1, W), (0, B)]
    assert {n: d for n, d in dots(part).items() if n.startswith("bwd")} == {
        "bwd_i_2": 1, "bwd_w_2": 1, "bwd_i_1": 1, "bwd_w_1": 1, "bwd_0": 1,
    }  # fmt: skip
    weights = {a.task for a in part.accumulators}
    assert {part.tasks[i].name for i in weights} == {"fwd_2", "bwd_w_2", "bwd_w_1", "bwd_0"}


def test_one_stage_and_no_gradient():
    assert kinds(chain_partition(1)) == [(0, F), (0, B)]
    part = partition_of(lambda p, b: treduce(lambda mb: chain_loss(p, mb), b, operation=Add), chain(3), batch_of(2))
    assert kinds(part) == [(0, F), (1, F), (2, F)]


def test_text():
    text = chain_partition(2).as_text()
    assert "task fwd_0 (stage 0)\ninputs " in text
    assert "task bwd_1 (stage 1)" in text
    assert "dot_general(" in text


# --- accumulators and carries --------------------------------------------------------------------------------------


def test_each_stage_accumulates_its_own_gradients():
    part = chain_partition(3)
    stage_of = [part.tasks[a.task].stage for a in part.accumulators]
    assert stage_of == [2, 0, 0, 1, 1, 2, 2]  # the losses, then b and w of each stage
    assert [a.part_of for a in part.accumulators] == list(range(7))


def test_a_sum_over_stages_is_kept_as_partial_sums():
    def tied(params: Any, mb: Any) -> jax.Array:
        return chain_loss([params[0], params[1], params[0]], mb)

    part = partition_of(gradients(None, tied), chain(2), batch_of(2))
    stages: dict[int, list[int]] = {}
    for accumulator in part.accumulators:
        stages.setdefault(accumulator.part_of, []).append(part.tasks[accumulator.task].stage)
    shared = [sorted(found) for found in stages.values() if len(found) > 1]
    assert shared == [[0, 2]] * 2  # b and w of the layer used twice
    first = next(t for t in part.tasks if t.name == "bwd_0").graph
    received = [v for v in first.inputs if any(v in t.graph.outputs for t in part.tasks if t.stage != 0)]
    assert len(received) == 1, "nothing but the gradient of its output: the whole sum has gone"


def test_only_reductions_that_need_it_ask_for_order():
    part = partition_of(
        lambda p, b: treduce(lambda mb: (chain_loss(p, mb), chain_loss(p, mb)), b, operation=(Add, Last)),
        chain(1),
        batch_of(2),
    )
    assert [a.ordered for a in part.accumulators] == [False, True]


def carried_step(write: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A carry that scales the first stage's input; `write(scale, grads)` gives its next value."""

    def step(params: Any, scale: Any, batch: Any) -> Any:
        def body(scale: Any, mb: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                return chain_loss(params, {**mb, "x": mb["x"] * scale})

            value, grads = jax.value_and_grad(loss)(params)
            return write(scale, grads), (value, grads)

        return treduce(body, batch, init=scale)

    return step


def test_a_carry_stays_with_its_stage():
    part = partition_of(carried_step(lambda scale, grads: jnp.sort(scale)), chain(2), jnp.ones(DIM), batch_of(2))
    assert [part.tasks[c.task].stage for c in part.carries] == [0]


def test_counters_are_kept_where_they_are_read_and_where_what_follows_from_them_is():
    """A counter that nobody reads is kept on the first stage, with those that it is computed from."""

    def step(params: Any, counters: Any, batch: Any) -> Any:
        def body(counters: Any, mb: Any) -> Any:
            read, behind, unread, source, apart = counters

            def loss(params: Any) -> jax.Array:
                x = mark_stage_end(jnp.tanh(mb["x"] @ params[0]["w"]))
                x = mark_stage_end(jnp.tanh(x @ params[1]["w"] * read))
                return jnp.mean((x @ params[2]["w"] * source - mb["y"]) ** 2)

            after = (read + behind, behind * 2.0, unread + source, source + 1.0, apart + 1.0)
            return after, jax.value_and_grad(loss)(params)

        return treduce(body, batch, init=counters)

    part = partition_of(step, chain(3), (jnp.ones(()),) * 5, batch_of(2))
    stages: dict[int, list[int]] = {}
    for carry in part.carries:
        stages.setdefault(carry.leaf, []).append(part.tasks[carry.task].stage)
    assert {leaf: sorted(found) for leaf, found in stages.items()} == {
        0: [1],  # read
        1: [1],  # behind
        2: [0],  # unread
        3: [0, 2],  # the source of what is unread, which the last stage reads
        4: [0],  # apart
    }


def test_a_carry_against_the_pipeline_is_refused():
    with pytest.raises(CarryError, match="forward of stage 0 and written later, in the backward of stage 0") as error:
        partition_of(carried_step(lambda scale, grads: scale + grads[0]["b"]), chain(2), jnp.ones(DIM), batch_of(2))
    assert "BatchNorm" not in str(error.value), "one module alone is at fault"


def test_a_module_that_two_stages_share_needs_variables_of_its_own_in_each():
    def step(params: Any, mean: Any, batch: Any) -> Any:
        def body(mean: Any, mb: Any) -> Any:
            def loss(params: Any) -> Any:
                x = mark_stage_end(jnp.tanh((mb["x"] - mean) @ params[0]["w"]))
                return jnp.mean((x @ params[1]["w"] - mb["y"]) ** 2), 0.9 * mean + 0.1 * jnp.cos(x).mean(0)

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return new, (value, grads)

        return treduce(body, batch, init=mean)

    text = r"first read at .*:\d+.* in the forward of stage 0 and written later, in the forward of stage 1:.*BatchNorm"
    with pytest.raises(CarryError, match=text):
        partition_of(step, chain(2), jnp.zeros(DIM), batch_of(2))


def test_a_leaf_that_another_leaf_keeps_is_read_where_that_is_written():
    """In whatever order the leaves stand: the last stage's forward hands on what a backward writes."""

    def step(params: Any, carry: Any, batch: Any) -> Any:
        def body(carry: Any, mb: Any) -> Any:
            value, grads = jax.value_and_grad(chain_loss)(params, mb)
            return (carry[0] + grads[0]["b"], carry[0]), (value, grads)

        return treduce(body, batch, init=carry)

    with pytest.raises(CarryError, match="read in the forward of stage 1 and written later, in the backward of stage"):
        partition_of(step, chain(2), (jnp.ones(DIM), jnp.ones(DIM)), batch_of(2))


# --- remat -------------------------------------------------------------------------------------------------------


def remat_inside(params: Any, mb: Any) -> jax.Array:
    layer = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]))
    x = mb["x"]
    for i, p in enumerate(params):
        x = mark_stage_end(x) if i else x
        x = layer(p, x)
    return jnp.mean((x - mb["y"]) ** 2)


def remat_across(params: Any, mb: Any) -> jax.Array:
    """One region over a mark and its two neighbours."""

    @jax.checkpoint
    def two(p: Any, q: Any, x: jax.Array) -> jax.Array:
        x = jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"])
        x = mark_stage_end(x)
        return jnp.tanh(jnp.tanh(x @ q["w"]) @ q["w"])

    x = two(params[0], params[1], mb["x"])
    x = mark_stage_end(x)
    x = jnp.tanh(jnp.tanh(x @ params[2]["w"]) @ params[2]["w"])
    return jnp.mean((x - mb["y"]) ** 2)


def plain_double(params: Any, mb: Any) -> jax.Array:
    x = mb["x"]
    for i, p in enumerate(params):
        x = mark_stage_end(x) if i else x
        x = jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"])
    return jnp.mean((x - mb["y"]) ** 2)


# Without remat, the backward of two layers has four products, three in the first stage. A stage that recomputes
# itself runs its own forward once more: at most two products on top, never those of a stage before.
PLAIN = {"fwd_0": 2, "fwd_1": 2, "fwd_2": 2, "bwd_2": 4, "bwd_1": 4, "bwd_0": 3}


@pytest.mark.parametrize(
    ("loss", "recomputing"),
    [
        (plain_double, ()),
        (remat_inside, ("bwd_0", "bwd_1", "bwd_2")),
        (jax.checkpoint(plain_double), ("bwd_0", "bwd_1", "bwd_2")),
        (remat_across, ("bwd_0", "bwd_1")),
    ],
    ids=["none", "inside", "around", "across"],
)
def test_a_stage_recomputes_only_itself(loss: Callable[..., Any], recomputing: tuple[str, ...]):
    part = chain_partition(3, loss)
    found = dots(part)
    for name, least in PLAIN.items():
        most = least + 2 if name in recomputing else least
        assert least <= found[name] <= most, (name, found)
    if recomputing:
        assert any(found[name] > PLAIN[name] for name in recomputing), "nothing is recomputed"
        kept = {t.name: len(t.graph.outputs) for t in part.tasks if t.kind is F and f"bwd_{t.stage}" in recomputing}
        plain = {t.name: len(t.graph.outputs) for t in chain_partition(3, plain_double).tasks}
        assert all(kept[name] < plain[name] for name in kept if name != "fwd_2"), "no residual is saved"


def test_a_fused_stage_keeps_its_recomputation():
    """A barrier stands between the forward and what recomputes it, or XLA would merge the two again."""
    part = chain_partition(2, jax.checkpoint(plain_double), fuse_last=True)
    (fused,) = [t for t in part.tasks if t.kind is FUSED]
    names = [e.name for e in fused.graph.equations]
    assert "dot_general" in names[: names.index("optimization_barrier")]
    assert "dot_general" in names[names.index("optimization_barrier") :]


# --- data and parameters -----------------------------------------------------------------------------------------


def test_data_is_sliced_by_the_index_and_a_parameter_only_meets_it():
    """The slice stands in a call (`jnp.take`); a weight times the index is no data."""

    def step(params: Any, batch: Any) -> Any:
        def body(i: Any) -> Any:
            taken = jax.tree.map(lambda x: jnp.take(x, i, axis=0), batch)
            return jax.value_and_grad(lambda p: chain_loss([{**p[0], "w": p[0]["w"] * i}, p[1]], taken))(params)

        return treduce_i(body, 4)

    part = partition_of(step, chain(2), batch_of(4))
    assert {v.aval.shape for v in part.data} == {(4, ROWS, DIM)}


# --- verify ------------------------------------------------------------------------------------------------------


def test_verify_finds_tasks_out_of_order():
    part = chain_partition(2)
    with pytest.raises(VerificationError, match="reads what no earlier step makes"):
        replace(part, tasks=part.tasks[::-1]).verify()


# --- any model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    weight: int  # equal numbers are tied
    skip: int | None  # add this earlier activation, of whatever stage
    ends_stage: bool
    aux: bool
    remat: bool


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    size = draw(st.integers(1, 6))
    return [
        Layer(
            weight=draw(st.integers(0, i)),
            skip=draw(st.none() | st.integers(0, i - 1)) if i else None,
            ends_stage=i < size - 1 and draw(st.booleans()),
            aux=draw(st.booleans()),
            remat=draw(st.booleans()),
        )
        for i in range(size)
    ]


def loss_of(model: list[Layer]) -> Callable[..., Any]:
    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array, index: jax.Array) -> Any:
        passed, aux = [x], jnp.float32(0)
        for layer in model:
            apply = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
            apply = jax.checkpoint(apply) if layer.remat else apply
            x = apply(weights[layer.weight], x)
            if layer.skip is not None:
                x = x + passed[layer.skip]
            if layer.aux:
                aux = aux + 0.1 * jnp.mean(x**2) * (1 + index)
            if layer.ends_stage:
                x = mark_stage_end(x)
            passed.append(x)
        return jnp.mean((x - y) ** 2) + aux, x.max()

    return loss


def body_of(model: list[Layer], frozen: int, remat: bool) -> tuple[Graph, list[Any]]:
    """The graph of loss, metric and gradients of all but the first `frozen` weights; operands, index last."""
    rng = np.random.default_rng(len(model))
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)  # noqa: E731
    weights = [draw(DIM, DIM) for _ in model]
    operands = [*weights, draw(ROWS, DIM), draw(ROWS, DIM), np.int32(3)]

    def body(*operands: Any) -> Any:
        *weights, x, y, index = operands

        def loss(trained: list[jax.Array]) -> Any:
            return loss_of(model)([*weights[:frozen], *trained], x, y, index)

        differentiated = jax.value_and_grad(jax.checkpoint(loss) if remat else loss, has_aux=True)
        (value, metric), grads = differentiated(weights[frozen:])
        return value, metric, *grads

    graph, consts = from_jaxpr(jax.make_jaxpr(body)(*operands))
    assert not consts
    return graph, operands


def check_each_equation_once(labels: Labels, part: Partition) -> None:
    """What has an effect stands in one task; what is free in as many as like; what has none in none."""
    stands = Counter(v for t in part.tasks for e in t.graph.equations for v in e.outputs)
    needed = set(labels.body.outputs)
    for equation in reversed(labels.body.equations):
        if needed.isdisjoint(equation.outputs):
            continue
        needed.update(equation.inputs)
        times = {stands[v] for v in equation.outputs}
        if equation in labels.free:
            assert min(times) >= 1 or equation.outputs[0] not in needed
        elif not _taken_apart(part, equation):
            assert times == {1}, f"{equation.name} stands in {times} tasks"


def _taken_apart(part: Partition, equation: Any) -> bool:
    """A sum over stages, which becomes partial sums."""
    return len({a.part_of for a in part.accumulators}) < len(part.accumulators) and equation.name in ("add_any", "add")


@given(model=models(), form=st.sampled_from(["fused", "apart", "split"]), data=st.data())
@settings(max_examples=20)
def test_any_model(model: list[Layer], form: str, data: st.DataObject):
    """Tasks run in the order of phases give what the body gives, bit for bit but for sums over stages."""
    frozen = data.draw(st.integers(0, len(model) - 1), "frozen")
    body, operands = body_of(model, frozen, data.draw(st.booleans(), "remat of the whole loss"))
    expected = body.run(*operands)
    flat = opened(inline(body), len(operands) - 1, operations=(Add,) * len(expected))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(flat.marks) - 1)), "cuts")) if flat.marks else []
    labels = label(flat, cuts)
    labels.verify()
    part = partition(labels, fuse_last=form == "fused", splits_backward=form == "split")
    part.verify()
    verify_effects(labels, part)
    check_each_equation_once(labels, part)
    assert part.num_stages == len(cuts) + 1

    values = dict(zip((*part.operands, part.index), operands, strict=True))
    values.update((a.state, a.init.run()[0]) for a in part.accumulators)
    for task in part.tasks:
        values.update(zip(task.graph.outputs, task.graph.run(*(values[v] for v in task.graph.inputs)), strict=True))
    for number, wanted in enumerate(expected):
        parts = [values[a.result] for a in part.accumulators if a.part_of == number]
        # Parts of several stages are added up from the first to the last: in a nested sum, a last bit may differ.
        rtol, atol = (1e-6, 1e-7) if len(parts) > 1 else (0, 0)
        np.testing.assert_allclose(sum(parts[1:], start=parts[0]), wanted, rtol=rtol, atol=atol)
