"""Work of a loop's constants: penalties on the weights stay with their weights, and casts are made once in a step."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec

from jaxpp_flax.engine.analyses.equation_facts import avals_of
from jaxpp_flax.engine.jit import mpmd_jit, mpmd_jit_with_loop
from jaxpp_flax.engine.passes.place import PlacementWarning
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.program.program import Run, Transfer
from jaxpp_flax.engine.tracing.ir import everywhere
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, treduce
from jaxpp_flax.schedules import ZBV, GPipe, Schedule, Std1F1B, ZeroBubble
from tests.engine.toys import built, mesh_of
from tests.helpers import slow, tree_allclose

D, STAGES, MICROBATCHES = 32, 3, 2
Weights = list[jax.Array]


def weights(count: int = STAGES) -> Weights:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(D, D)) / D**0.5, jnp.float32) for _ in range(count)]


BATCH = np.random.default_rng(1).normal(size=(MICROBATCHES, 4, D)).astype(np.float32)


def layers(ws: Weights, x: jax.Array) -> jax.Array:
    for i, w in enumerate(ws):
        x = jnp.tanh((mark_stage_end(x) if i else x) @ w)
    return x


def error(ws: Weights, x: jax.Array) -> jax.Array:
    return jnp.mean(layers(ws, x) ** 2)


def squares(ws: Weights) -> jax.Array:
    return 0.01 * sum(jnp.sum(w**2) for w in ws)  # type: ignore[return-value]


def orthogonality(ws: Weights) -> jax.Array:
    return 0.01 * sum(jnp.sum((w.T @ w - jnp.eye(D)) ** 2) for w in ws)  # type: ignore[return-value]


def examples(x: jax.Array) -> jax.Array:
    """A weight that depends on the microbatch: so do the cotangents of a penalty behind it."""
    return jnp.sum(x[:, 0] > 0) + 1.0


def rows(w: jax.Array, scale: Any = 1.0) -> jax.Array:
    """The sum of the rows' norms, by a scan: its gradient reads arrays that the scan makes beside this number."""
    norm = lambda total, row: (total + scale * jnp.sqrt(jnp.sum(row**2)), None)  # noqa: E731
    return jax.lax.scan(norm, jnp.float32(0), w)[0]


def either(w: jax.Array, which: jax.Array) -> jax.Array:
    return jax.lax.cond(which > 0, lambda w: jnp.sum(jnp.sin(w) ** 2), lambda w: jnp.sum(w**4), w)


LOSSES: dict[str, Callable[[Weights, Any], jax.Array]] = {
    "sum of squares": lambda ws, x: error(ws, x) + squares(ws),
    "absolute values": lambda ws, x: error(ws, x) + 0.01 * sum(jnp.sum(jnp.abs(w)) for w in ws),
    "norm": lambda ws, x: error(ws, x) + optax.tree.norm(ws),
    "singular values": lambda ws, x: error(ws, x) + 0.01 * sum(jnp.linalg.norm(w, "nuc") for w in ws),
    "determinants": lambda ws, x: error(ws, x) - 0.01 * sum(jnp.linalg.slogdet(w.T @ w + jnp.eye(D))[1] for w in ws),
    "largest": lambda ws, x: error(ws, x) + sum(jnp.max(jnp.abs(w)) for w in ws),
    "orthogonality": lambda ws, x: error(ws, x) + orthogonality(ws),
    "rows in a scan": lambda ws, x: error(ws, x) * (1 + sum(map(rows, ws))),
    "rows in a loop": lambda ws, x: (
        error(ws, x) + sum(jax.lax.fori_loop(0, D, lambda i, s, w=w: s + jnp.sum(jnp.sin(w[i]) ** 2), 0.0) for w in ws)
    ),
    "condition": lambda ws, x: error(ws, x) + sum(either(w, w[0, 0]) for w in ws),
    "factor": lambda ws, x: error(ws, x) * (1 + optax.tree.norm(ws)),
    "weighted": lambda ws, x: examples(x) * (error(ws, x) + orthogonality(ws)),
    "in a jit": lambda ws, x: error(ws, x) * jax.jit(squares)(ws),
    "recomputed": lambda ws, x: error(ws, x) * jax.checkpoint(squares)(ws),
    "all recomputed": lambda ws, x: jax.checkpoint(lambda ws: error(ws, x) + squares(ws))(ws),
    "distance": lambda ws, x: error(ws, x) + sum(jnp.sum((w - o) ** 2) for w, o in zip(ws, weights(), strict=True)),
    "shared layer": lambda ws, x: error([*ws[:-1], ws[0]], x) + squares(ws),
}


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step that returns a norm as metric as well."""

    def step(ws: Weights, batch: Any, schedule: Schedule | None) -> Any:
        body = jax.value_and_grad(lambda ws, x: (loss(ws, x), optax.tree.norm(ws)), has_aux=True)
        (losses, norm), grads = treduce(lambda x: body(ws, x), batch, schedule, operation=((Concat(), Add), Add))
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], losses, norm

    return step


def compiled(loss: Callable[..., Any], schedule: Schedule, mesh: Any = None, batch: Any = BATCH, **specs: Any) -> Any:
    function = mpmd_jit_with_loop(step_of(loss), mesh or mesh_of(schedule.num_ranks), static_argnums=2, **specs)
    return function.compile(weights(schedule.num_stages), batch, schedule)


def sent(found: CompiledPipeline) -> set[tuple[int, ...]]:
    """The shapes of what goes from rank to rank."""
    held = found.executables.held  # pyright: ignore[reportPrivateUsage]
    moves = [i for i in found.program.instructions if isinstance(i, Transfer)]
    return {tuple(held[value].aval.shape) for move in moves for value in move.sent}


def check(loss: Callable[..., Any], schedule: Schedule, mesh: Any = None, **specs: Any) -> CompiledPipeline:
    found = compiled(loss, schedule, mesh, **specs)
    ws = weights(schedule.num_stages)
    tree_allclose(
        jax.tree.map(np.asarray, found(ws, BATCH)), jax.jit(step_of(loss), static_argnums=2)(ws, BATCH, None), rtol=1e-5
    )
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_penalty_brings_no_weight_to_another_rank(name: str):
    found = check(LOSSES[name], Std1F1B(STAGES))
    ranks = [set(of) for of in found.program.arguments[-STAGES - 1 : -1]]
    read_twice = {0: {0, 2}, 2: {2}} if name == "shared layer" else {}
    assert ranks == [read_twice.get(rank, {rank}) for rank in range(STAGES)]
    assert sent(found) <= {(), (4, D), *([(D, D)] if name == "shared layer" else [])}


@pytest.mark.parametrize("schedule", [ZeroBubble(3), ZBV(4, 2), slow(GPipe(3))], ids=str)
@pytest.mark.parametrize("name", ["factor", slow("orthogonality")])
def test_under_every_schedule(name: str, schedule: Schedule):
    found = check(LOSSES[name], schedule)
    assert all(len(ranks) == 1 for ranks in found.program.arguments[-schedule.num_stages - 1 : -1])
    assert sent(found) <= {(), (4, D)}


@pytest.mark.parametrize(
    ("kind", "weight", "more"),
    [
        (AxisType.Auto, PartitionSpec(), {}),
        (AxisType.Auto, PartitionSpec("data"), {"fsdp": "step"}),
        slow(AxisType.Auto, PartitionSpec("data"), {}),
        slow(AxisType.Explicit, PartitionSpec(), {}),
    ],
)
def test_with_a_data_axis(kind: AxisType, weight: PartitionSpec, more: dict[str, Any]):
    specs = {"in_specs": (weight, PartitionSpec(None, "data")), **more}
    found = check(LOSSES["factor"], Std1F1B(STAGES), mesh_of(STAGES, kind, data=2), **specs)
    assert all(len(ranks) == 1 for ranks in found.program.arguments[-STAGES - 1 : -1])


def test_a_norm_before_the_loop_is_computed_where_the_weights_are():
    def step(ws: Weights, batch: Any, schedule: Schedule | None) -> Any:
        norm = optax.tree.norm(ws)
        return treduce(lambda x: jax.value_and_grad(lambda ws: error(ws, x) * norm)(ws), batch, schedule)

    placed = built(lambda ws, batch: step(ws, batch, Std1F1B(STAGES)), STAGES, weights(), BATCH).placed
    placed.verify()
    assert [sorted(placed.need[value]) for value in placed.inputs[:STAGES]] == [[0], [1], [2]]


def test_one_vector_of_all_weights_is_told_once():
    """Slices of its gradient are read by every stage, so every stage gets all weights."""

    def loss(ws: Weights, x: jax.Array) -> jax.Array:
        return error(ws, x) + 0.01 * jnp.sum(jnp.concatenate([w.ravel() for w in ws]) ** 2)

    said = rf"`concatenate` at .*test_hoist_constants.*brings parameters .* stages 0, 1, 2 \({6 * D * D * 4:,} bytes\)"
    with pytest.warns(PlacementWarning, match=said) as caught:
        found = compiled(loss, Std1F1B(STAGES))
    inside = [warning for warning in caught if "inside the loop" in str(warning.message)]
    assert len(inside) == 1
    assert found.program.arguments


@pytest.mark.parametrize("penalty", [rows, either])
def test_penalties_that_depend_on_the_microbatch_are_told(penalty: Callable[..., jax.Array]):
    """They cannot be moved in front of the loop; beside the number, they make what its gradient reads."""
    name = {rows: "scan", either: "cond"}[penalty]
    said = rf"`{name}` at .*test_hoist_constants.*brings parameters .* stages 2 \({2 * D * D * 4:,} bytes\)"
    with pytest.warns(PlacementWarning, match=said):
        compiled(lambda ws, x: error(ws, x) + sum(penalty(w, x[0, 0]) for w in ws), Std1F1B(STAGES))


def test_second_order_work_is_told_at_the_line_of_the_user():
    """The products stand in a layer of Flax."""

    def model(ws: Weights, x: jax.Array) -> jax.Array:
        for i, w in enumerate(ws):
            dense = nn.Dense(D, use_bias=False)
            x = jnp.tanh(jnp.asarray(dense.apply({"params": {"kernel": w}}, mark_stage_end(x) if i else x)))
        return jnp.sum(x)

    said = r"differentiates a gradient at .*test_hoist_constants\.py:\d+ \(.*model\)"
    with pytest.warns(PlacementWarning, match=said):
        compiled(lambda ws, x: jnp.mean(jax.grad(model, argnums=1)(ws, x) ** 2), Std1F1B(STAGES))


def test_second_order_work_is_told_with_its_products():
    def penalised(ws: Weights, x: jax.Array) -> jax.Array:
        total, slope = jax.value_and_grad(lambda x: jnp.sum(layers(ws, x)))(x)
        return 0.01 * total + jnp.mean(slope**2)

    with pytest.warns(PlacementWarning, match="differentiates a gradient at .*matrix products") as caught:
        found = check(penalised, Std1F1B(STAGES))
    (text,) = {str(warning.message) for warning in caught}
    ran, total = map(int, re.findall(r"(\d+) of the (\d+)", text)[0])
    names = Counter(
        {
            task.name: sum(e.primitive.name == "dot_general" for e in everywhere(task.graph))
            for task in found.program.tasks
        }
    )
    assert (names["bwd_0"], sum(names.values())) == (ran, total)
    assert ran > total / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlacementWarning)
        compiled(penalised, Std1F1B(STAGES), batch=jnp.concatenate([BATCH, BATCH], axis=1))  # another loop


# Casts.


def casts(found: CompiledPipeline, shape: tuple[int, ...] = (D, D)) -> Counter[str]:
    """How often each task makes a bfloat16 array of a shape by a cast of a float32 one, in one step."""
    tasks, counted = found.program.tasks, Counter[str]()
    wanted = f"bfloat16{list(shape)}".replace(" ", "")
    for run in [i for i in found.program.instructions if isinstance(i, Run)]:
        for equation in everywhere(tasks[run.task].graph):
            if equation.primitive.name == "convert_element_type":
                (operand,), (result,) = avals_of(equation)
                counted[tasks[run.task].name] += operand.dtype == jnp.float32 and result.str_short() == wanted
    return +counted


def narrow(ws: Weights, x: jax.Array) -> jax.Array:
    return jnp.mean(layers([w.astype(jnp.bfloat16) for w in ws], x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


def blocks(around: Callable[[Any], Any]) -> Callable[[Weights, jax.Array], jax.Array]:
    """A loss whose blocks cast their weights inside of what is around each."""
    block = around(lambda w, x: jnp.tanh(jnp.sin(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))))

    def loss(ws: Weights, x: jax.Array) -> jax.Array:
        for i, w in enumerate(ws):
            x = block(w, mark_stage_end(x) if i else x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


@pytest.mark.parametrize(
    "loss",
    [
        narrow,
        jax.checkpoint(narrow),
        lambda ws, x: narrow(ws, x) + sum(jnp.max(w.astype(jnp.bfloat16)) for w in ws),
        lambda ws, x: narrow([w.T.astype(jnp.bfloat16) for w in ws], x),
        lambda ws, x: narrow([w.reshape(-1).astype(jnp.bfloat16).reshape(D, D) for w in ws], x),
        blocks(jax.checkpoint),
        blocks(partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)),
        blocks(jax.jit),
        blocks(lambda block: jax.checkpoint(jax.jit(block))),
        blocks(lambda block: jax.jit(jax.checkpoint(block))),
    ],
    ids=[
        *("cast", "recomputed", "twice", "transposed", "reshaped", "recomputed block", "block with a policy"),
        *("block in a jit", "recomputed jit", "recomputed block in a jit"),
    ],
)
@pytest.mark.parametrize("schedule", [Std1F1B(STAGES), slow(ZeroBubble(STAGES))], ids=str)
def test_each_weight_is_cast_once_in_a_step(loss: Callable[..., Any], schedule: Schedule):
    found, ws = compiled(loss, schedule), weights()
    made = casts(found) + casts(found, (D * D,))
    assert all(name.startswith("outer_") for name in made), made
    assert sum(made.values()) == STAGES
    new, losses, _ = jax.tree.map(np.asarray, found(ws, BATCH))
    expected, expected_losses, _ = jax.jit(step_of(loss), static_argnums=2)(ws, BATCH, None)
    tree_allclose(losses, expected_losses, rtol=1e-2)
    assert {leaf.dtype for leaf in new} == {np.dtype("float32")}
    for mine, theirs in zip(new, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-3)


@pytest.mark.parametrize("loss", [narrow, blocks(jax.checkpoint)], ids=["cast", "recomputed block"])
def test_casts_of_a_data_axis_and_of_shards(loss: Callable[..., Any]):
    specs = {"in_specs": (PartitionSpec("data"), PartitionSpec(None, "data"))}
    for more in ({}, {"fsdp": "step"}):
        found = compiled(loss, Std1F1B(STAGES), mesh_of(STAGES, data=2), **specs, **more)
        assert sum(casts(found).values()) == STAGES


def test_wider_copies_and_what_depends_on_the_microbatch_stay_in_the_loop():
    """A wider copy would take more memory than the weight."""

    def loss(ws: Weights, x: jax.Array) -> jax.Array:
        return error([w.astype(jnp.float32) for w in ws], x)

    def step(ws: Weights, batch: Any) -> Any:
        return treduce(lambda x: jax.value_and_grad(loss)(ws, x), batch, Std1F1B(STAGES))

    program = built(step, STAGES, [w.astype(jnp.bfloat16) for w in weights()], BATCH).program
    assert not [task for task in program.tasks if task.name.startswith("outer_")]


def test_a_function_without_a_loop_keeps_the_work_of_its_stages():
    """All its work is work of constants. Its penalty stays with the weights too."""
    aside = lambda ws, x: (error(ws, x), jnp.sum(jnp.tanh(x @ ws[0])))  # noqa: E731
    found = mpmd_jit(aside, mesh_of(STAGES)).compile(weights(), BATCH[0])
    assert sum(e.name == "dot_general" for task in found.program.tasks for e in task.graph.equations) == STAGES + 1
    loss = LOSSES["factor"]
    step = jax.value_and_grad(loss)
    found = mpmd_jit(step, mesh_of(STAGES)).compile(weights(), BATCH[0])
    assert [set(ranks) for ranks in found.program.arguments[:STAGES]] == [{0}, {1}, {2}]
    tree_allclose(jax.tree.map(np.asarray, found(weights(), BATCH[0])), step(weights(), BATCH[0]), rtol=1e-5)
