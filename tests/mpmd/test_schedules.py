"""Every schedule, on the assignment that it wants: results are those of plain jax.jit, tasks run in its order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax import mpmd
from jaxpp_flax.schedules import Circular, Schedule, Std1F1B
from jaxpp_flax.schedules.task import Task, TaskKind, flatten, forward
from tests.helpers import slow, tree_allclose
from tests.mpmd.programs import (
    accumulate,
    batches,
    config,
    in_runs,
    in_turn,
    loss,
    model,
    runs_of,
    topology,
    train_step,
    weights,
)

RUNS = [name for name in mpmd.PIPELINE_SCHEDULES if "CIRCULAR" not in name and "WRAP" not in name]


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        (None, 1),
        ("ONE_FWD_ONE_BWD", 1),
        *((name, 3) for name in RUNS),
        slow(None, 5),
        *(slow(name, 1) for name in RUNS if name != "ONE_FWD_ONE_BWD"),
    ],
)
def test_equals_plain_jit(schedule: str | None, microbatches: int):
    ws, xs = weights(2), batches(microbatches)
    step = mpmd.jit(accumulate, config(topology(1, 1), in_runs(2, 2), schedule))
    # Losses and raw gradients; sums of the same float32 numbers in the same order, compiled apart: 1e-5 by the rules.
    tree_allclose(step(ws, xs), jax.jit(accumulate)(ws, xs))


@pytest.mark.parametrize("schedule", [slow("CIRCULAR"), "CIRCULAR_WITH_REVERSED_BACKWARD", slow("GPIPE")])
def test_several_stages_on_each_mesh_equal_plain_jit(schedule: str):
    ws, xs = weights(4), batches(3)
    step = mpmd.jit(train_step, config(topology(1, 1), in_turn(4, 2), schedule))
    tree_allclose(step(ws, xs), jax.jit(train_step)(ws, xs))


@pytest.mark.parametrize(
    ("name", "schedule"), [("ONE_FWD_ONE_BWD", Std1F1B(3)), ("CIRCULAR", Circular(6, 3))], ids=["1f1b", "circular"]
)
def test_meshes_run_the_tasks_of_the_schedule_in_its_order(name: str, schedule: Schedule):
    blocks, microbatches = schedule.num_stages, 6
    ws, xs = weights(blocks), batches(microbatches)
    lowered = mpmd.jit(accumulate, config(topology(1, 1, 1), in_turn(blocks, 3), name)).lower(ws, xs)
    for mesh, tasks in enumerate(schedule.tasks(microbatches)):
        kinds = {TaskKind.FORWARD: "fwd", TaskKind.BACKWARD: "bwd"}
        wanted = [(f"{kinds[t.kind]}_{t.stage}", t.microbatch) for t in flatten(tasks)]
        found: list[tuple[str, int]] = []
        for label, microbatch in runs_of(lowered, mesh):
            kind, _, stage = label.rpartition("_")
            # The last stage's two tasks may be one.
            found += [(f"{part}_{stage}", microbatch) for part in kind.split("_")]
        assert found == wanted


@pytest.mark.parametrize("microbatches", [slow(1), slow(2), 3])
def test_circular_order_of_a_program_that_is_differentiated_as_a_whole(microbatches: int):
    """Stages 1 to 4 on two meshes in turn; the backward pass of a microbatch keeps the microbatch's counter."""

    def forward_pass(w, x):
        x = mpmd.named_computation(lambda a, b: a @ b, name="stage1")(w, x)
        for number in (2, 3, 4):
            x = mpmd.named_computation(lambda a: a @ a, name=f"stage{number}")(x)
        return x

    def train(w, xs):
        def total(w):
            y = sum(mpmd.call(forward_pass, call_counter=i)(w, xs[i]) for i in range(microbatches))
            return jnp.sum(y * y)

        return jax.value_and_grad(total)(w)

    cfg = config(
        topology(2, 2),
        {"stage1": "m0", "stage2": "m1", "stage3": "m0", "stage4": "m1"},
        "CircularWithReversedBackward",
        name_to_stage_assignment={f"stage{i}": i for i in (1, 2, 3, 4)},
    )
    w, xs = jnp.eye(8) + 0.01, [0.1 * jnp.ones((8, 8))] * 4
    step = mpmd.jit(train, cfg)
    tree_allclose(step(w, xs), jax.jit(train)(w, xs))
    names = {"fwd_0": "1", "fwd_2": "3", "bwd_0": "1'", "bwd_2": "3'"}
    on_first = [names[label] for label, _ in runs_of(step.lower(w, xs), 0) if label in names]
    rounds = [min(2, microbatches - first) for first in range(0, microbatches, 2)]
    forwards = [s for r in rounds for s in ["1"] * r + ["3"] * r]
    assert on_first == forwards + [s + "'" for s in reversed(forwards)]


@pytest.mark.parametrize("schedule", ["ZERO_BUBBLE_H1", "ZERO_BUBBLE_H2_ZERO_TX_LATENCY"])
def test_zero_bubble_splits_the_backward_of_all_stages_but_the_first(schedule: str):
    ws, xs = weights(3), batches(6)
    lowered = mpmd.jit(accumulate, config(topology(1, 1, 1), in_runs(3, 3), schedule)).lower(ws, xs)
    names = [{label for label, _ in runs_of(lowered, mesh)} for mesh in range(3)]
    assert names == [{"fwd_0", "bwd_0"}, {"fwd_1", "bwd_i_1", "bwd_w_1"}, {"fwd_2", "bwd_i_2", "bwd_w_2"}]
    last_input = max(i for i, (label, _) in enumerate(runs_of(lowered, 1)) if label == "bwd_i_1")
    assert runs_of(lowered, 1)[last_input + 1 :], "no weight gradient was put off"


def test_compilations_do_not_grow_with_microbatches():
    counts = []
    for microbatches in (4, 12):
        step = mpmd.jit(train_step, config(topology(1, 1), in_runs(2, 2), "ONE_FWD_ONE_BWD"))
        step.lower(weights(2), batches(microbatches)).compile()
        counts.append((step.compiler.lowerings, step.compiler.compilations))
    assert counts[0] == counts[1]


def test_one_program_for_all_microbatches_that_read_their_index():
    tasks = []
    for microbatches in (3, 6):
        stacked = jnp.stack(batches(microbatches))

        def fun(ws, stacked, microbatches=microbatches):
            return mpmd.fori_loop(microbatches, lambda i, carry: carry + loss(ws, stacked[i]), jnp.zeros(()))

        lowered = mpmd.jit(jax.value_and_grad(fun), config(topology(1, 1), in_runs(2, 2))).lower(weights(2), stacked)
        tasks.append(len(lowered.built.program.tasks))
    assert tasks == [8, 8]


def test_unnamed_work_runs_with_the_named_work_around_it():
    """What a later stage reads of the batch opens no program of its own; a sum waits alone if it must."""

    def masked(ws, both):
        x, targets = both
        weight = jnp.tanh(targets).sum(axis=1, keepdims=True)
        return jnp.mean((model(ws, x) * weight) ** 2)

    def fun(ws, both):
        return accumulate(ws, both, masked)

    ws, xs = weights(3), batches(4)
    both = list(zip(xs, batches(4), strict=True))
    lowered = mpmd.jit(fun, config(topology(1, 1, 1), in_runs(3, 3), "GPIPE")).lower(ws, both)
    assert [len(runs_of(lowered, mesh)) for mesh in range(3)] == [8, 8, 8]
    tree_allclose(lowered.compile()(ws, both), jax.jit(fun)(ws, both))
    reversed_ = config(topology(1, 1, 1), in_runs(3, 3), "CIRCULAR_WITH_REVERSED_BACKWARD")
    lowered = mpmd.jit(accumulate, reversed_).lower(ws, xs)
    assert [len(runs_of(lowered, mesh)) for mesh in range(3)] == [11, 11, 11]


def test_a_schedule_object():
    class FirstInFirstOut(Schedule):
        def tasks(self, num_microbatches: int):
            backward = [[Task(TaskKind.BACKWARD, s, m) for m in range(num_microbatches)] for s in range(self.num_ranks)]
            return [[*(forward(s, m) for m in range(num_microbatches)), *backward[s]] for s in range(self.num_ranks)]

    ws, xs = weights(2), batches(3)
    cfg = mpmd.make_config(topology(1, 1), in_runs(2, 2), pipeline_schedule=FirstInFirstOut(2))
    tree_allclose(mpmd.jit(accumulate, cfg)(ws, xs), jax.jit(accumulate)(ws, xs))


def test_loops_number_their_iterations():
    ws, xs = weights(2), batches(2)

    def by_hand(ws, xs):
        total = jnp.zeros(())
        for x in xs:
            total = total + loss(ws, x)
        return total

    def enumerated(ws, xs):
        return mpmd.enumerated_for(lambda carry, i, x: carry + loss(ws, x), jnp.zeros(()), xs)

    def looped(ws, xs):
        stacked = jnp.stack(xs)
        return mpmd.fori_loop(len(xs), lambda i, carry: carry + loss(ws, stacked[i]), jnp.zeros(()))

    expected = jax.jit(jax.value_and_grad(by_hand))(ws, xs)
    for fun in (enumerated, looped):
        grad = jax.value_and_grad(fun)
        step = mpmd.jit(grad, config(topology(1, 1), in_runs(2, 2), "ONE_FWD_ONE_BWD"))
        lowered = step.lower(ws, xs)
        assert {m for _, m in runs_of(lowered, 0)} == {0, 1}
        tree_allclose(lowered.compile()(ws, xs), expected)
