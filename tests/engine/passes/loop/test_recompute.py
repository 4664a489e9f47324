"""The tasks of stages that recompute their residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxpp_flax.engine.passes.loop.loop import Partition
from jaxpp_flax.engine.program.program import LoopTask
from jaxpp_flax.engine.traced import Marks, cut_at_every_mark
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.planning.predicted.blocks import Blocks
from jaxpp_flax.schedules import GPipe, Schedule, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
from jaxpp_flax.schedules.task import TaskKind
from tests.engine.toys import built, chain, count, gradients
from tests.helpers import DIM, batch_of

RECOMPUTE = StageResiduals(recompute=True)


def tasks_of(schedule: Schedule, plan: ResidualPlan | None, loss: Callable[..., Any] | None = None) -> Partition:
    """The tasks after all passes; `JAXPP_FLAX_VERIFY` checks them."""
    step = gradients(schedule) if loss is None else gradients(schedule, loss)
    (loop,) = built(step, schedule.num_ranks, chain(schedule.num_stages), batch_of(4), residuals=plan).loops
    return loop.partition


def task(part: Partition, kind: TaskKind, stage: int) -> LoopTask:
    (found,) = [t for t in part.tasks if (t.kind, t.stage) == (kind, stage)]
    return found


def kept(part: Partition, stage: int) -> set[Value]:
    """What is held from a stage's forward to its backward: neither operands nor accumulators, carries or gradients."""
    forward = task(part, TaskKind.FORWARD, stage)
    there = {*forward.graph.inputs, *forward.graph.outputs} - {*part.operands, part.index}
    backward = [t for t in part.tasks if t.stage == stage and t.kind is not TaskKind.FORWARD]
    return {v for t in backward for v in t.graph.inputs if v in there}


@pytest.mark.parametrize("schedule", [GPipe(3), ZeroBubble(3)], ids=lambda s: type(s).__name__)
def test_only_the_inputs_of_the_stages_are_kept(schedule: Schedule):
    before = tasks_of(schedule, None)
    part = tasks_of(schedule, ResidualPlan([RECOMPUTE] * 3))
    assert not kept(part, 0)  # its input is the batch
    for stage in (1, 2):
        (received,) = kept(part, stage)
        assert received in task(part, TaskKind.FORWARD, stage - 1).graph.outputs
        assert len(kept(before, stage)) > 1
    # What the forward makes is for the next stage alone.
    first, second = (task(part, TaskKind.FORWARD, stage).graph for stage in (0, 1))
    assert set(first.outputs) <= set(second.inputs)
    assert count(first, "sub") == 0, "the derivative of tanh is computed in the backward alone"


def test_the_input_gradient_hands_on_what_the_weight_gradient_reads():
    part = tasks_of(ZeroBubble(3), ResidualPlan([KEEP, RECOMPUTE, KEEP]))
    plain = tasks_of(ZeroBubble(3), None)
    inputs, weights = (task(part, kind, 1) for kind in (TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT))
    assert count(inputs.graph, "tanh") == 1
    assert count(weights.graph, "tanh") == 0
    assert not set(task(part, TaskKind.FORWARD, 1).graph.outputs) & set(weights.graph.inputs)
    for stage in (0, 2):  # the others are as they were
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT):
            texts = [[t.graph.as_text() for t in p.tasks if (t.kind, t.stage) == (kind, stage)] for p in (part, plain)]
            assert texts[0] == texts[1]


def test_a_task_keeps_the_values_that_it_computes_itself():
    """Every stage reads the microbatch: its forward takes the slice, and so does the task of its weight gradient."""

    def loss(params: Any, mb: Any) -> jax.Array:
        x = mb["x"]
        for i, p in enumerate(params):
            x = mark_stage_end(x) if i else x
            x = jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"] + mb["x"] @ p["w"])
        return jnp.mean((x - mb["y"]) ** 2)

    part = tasks_of(ZeroBubble(3), ResidualPlan([RECOMPUTE] * 3), loss)
    assert count(task(part, TaskKind.BACKWARD_WEIGHT, 1).graph, "dynamic_slice") > 0
    for t in part.tasks:
        t.graph.verify()


def test_a_fused_stage_has_nothing_to_recompute():
    part, plain = (tasks_of(Std1F1B(2), plan) for plan in (ResidualPlan([KEEP, RECOMPUTE]), None))
    assert [t.graph.as_text() for t in part.tasks] == [t.graph.as_text() for t in plain.tasks]


def wide_loss(params: Any, mb: Any) -> jax.Array:
    """Stages with a norm, an activation of several operations, and two products."""
    x = mb["x"]
    for i, p in enumerate(params):
        x = mark_stage_end(x) if i else x
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(y @ p["w"]) @ p["w"]
    return jnp.mean((x - mb["y"]) ** 2)


@pytest.mark.parametrize("schedule", [GPipe(3), ZeroBubble(3)], ids=lambda s: type(s).__name__)
def test_planners_count_the_bytes_that_stages_keep(schedule: Schedule):
    seen: list[Marks] = []

    def policy(marks: Any, num_stages: int) -> Any:
        seen.append(marks)
        return cut_at_every_mark(marks, num_stages)

    arguments = chain(3), batch_of(4)
    (loop,) = built(gradients(schedule, wide_loss), 3, *arguments, policy=policy).loops
    for stage in range(3):
        read_by_weights = {v for t in loop.partition.tasks if t.stage == stage and t.kind is TaskKind.BACKWARD_INPUT
                           for v in t.graph.outputs}  # fmt: skip
        planned = [h for h in Blocks.of(seen[-1]).holdings if h.kind == "activations" and stage in h.blocks]
        if not read_by_weights:
            assert sum(h.nbytes for h in planned) == sum(v.nbytes for v in kept(loop.partition, stage))
        assert sum(h.nbytes for h in planned) >= sum(v.nbytes for v in kept(loop.partition, stage))


def policy_loss(params: Any, mb: Any) -> jax.Array:
    """A stage whose policy keeps one named value and recomputes the rest."""

    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        x = checkpoint_name(jax.lax.erf(x @ w), "saved")
        return jnp.cos(jnp.tanh(x))

    policy = jax.checkpoint_policies.save_only_these_names("saved")
    x = jax.checkpoint(block, policy=policy)(mb["x"] * 2, params[0]["w"])
    x = mark_stage_end(jnp.tanh(x * 3))
    return jnp.mean((x @ params[1]["w"] - mb["y"]) ** 2)


def test_what_a_policy_saves_stays_saved():
    part = tasks_of(GPipe(2), ResidualPlan([RECOMPUTE, KEEP]), policy_loss)
    forward, backward = task(part, TaskKind.FORWARD, 0), task(part, TaskKind.BACKWARD, 0)
    (saved,) = kept(part, 0)
    (maker,) = [e for e in forward.graph.equations if saved in e.outputs]
    assert maker.name == "reduce_precision", "jax.checkpoint's own mark of a saved value"
    assert len(kept(tasks_of(GPipe(2), None, policy_loss), 0)) > 1
    assert count(backward.graph, "erf") == 0, "the saved value is not computed again"
    assert count(backward.graph, "cos") > 0


def test_a_carry_is_read_again_as_it_was():
    def step(params: Any, mean: Any, batch: Any) -> Any:
        def body(mean: Any, mb: Any) -> Any:
            def loss(params: Any) -> Any:
                new = 0.9 * mean + 0.1 * mb["x"].mean(0)
                x = jnp.tanh((mb["x"] - new) @ params[0]["w"])
                return jnp.mean((mark_stage_end(x) @ params[1]["w"] - mb["y"]) ** 2), new

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return new, (value, grads)

        return treduce(body, batch, GPipe(2), init=mean)

    plan = ResidualPlan([RECOMPUTE, KEEP])
    (loop,) = built(step, 2, chain(2), np.zeros(DIM, np.float32), batch_of(4), residuals=plan).loops
    part = loop.partition
    (carry,) = part.carries
    backward = task(part, TaskKind.BACKWARD, 0)
    assert carry.state in backward.graph.inputs
    assert carry.result not in backward.graph.outputs
