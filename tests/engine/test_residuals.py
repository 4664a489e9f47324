"""Steps that recompute or offload their residuals compute what plain `jax.jit` computes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import HOST_MEMORY, Run, Transfer
from jaxpp_flax.engine.runtime import instruction_loop
from jaxpp_flax.engine.summary import summarise_stages
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Schedule, ScheduleError, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
from tests.engine.toys import built, chain, mesh_of, sgd_step
from tests.helpers import DIM, batch_of, slow, tree_allclose

OFFLOAD = StageResiduals(offload=1.0)
RECOMPUTE = StageResiduals(recompute=True)
BOTH = StageResiduals(recompute=True, offload=1.0)
HALF = StageResiduals(offload=0.5)


def rich_loss(params: Any, carry: Any, mb: Any) -> Any:
    """Tied weights, a skip connection, dropout, running statistics as of BatchNorm, and a loss of each stage's own."""
    means, count = carry
    x = skip = jnp.tanh(mb["x"] @ params["tied"])
    own, new = 0.0, []
    for i, (layer, mean) in enumerate(zip(params["layers"], means, strict=True)):
        if i:
            x = mark_stage_end(x)
        new.append(0.9 * mean + 0.1 * x.mean(0))
        x = jnp.tanh((x - jax.lax.stop_gradient(new[-1])) @ layer["w"] + layer["b"])
        own += 0.01 * jnp.mean(x**4)
        x = x * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), count + i), 0.8, x.shape)
    loss = jnp.mean(((x + skip) @ params["tied"].T - mb["y"]) ** 2) + own
    return loss, (new, count + 10)


def rich_step(params: Any, carry: Any, batch: Any, schedule: Schedule | None) -> Any:
    def body(carry: Any, mb: Any) -> Any:
        (loss, carry), grads = jax.value_and_grad(rich_loss, has_aux=True)(params, carry, mb)
        return carry, (loss, grads)

    carry, (losses, grads) = treduce(body, batch, schedule, init=carry)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), carry, losses, grads


def arguments(num_stages: int, num_microbatches: int = 4) -> Any:
    tied = jnp.asarray(np.random.default_rng(5).normal(size=(DIM, DIM)) / DIM**0.5, jnp.float32)
    carry = [jnp.zeros(DIM) for _ in range(num_stages)], jnp.int32(7)
    return {"tied": tied, "layers": chain(num_stages)}, carry, batch_of(num_microbatches)


@functools.cache
def plain(num_stages: int) -> Any:
    return numpy(jax.jit(functools.partial(rich_step, schedule=None))(*arguments(num_stages)))


def numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def pipelined(schedule: Schedule, stages: list[StageResiduals] | None, fetch_ahead: int = 1) -> Any:
    plan = None if stages is None else ResidualPlan(stages, fetch_ahead=fetch_ahead)
    step = functools.partial(rich_step, schedule=schedule)
    return mpmd_jit_with_loop(step, mesh_of(schedule.num_ranks), residuals=plan, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    "schedule",
    [GPipe(2), slow(GPipe(3)), slow(Std1F1B(3)), slow(ZeroBubble(3)), slow(Interleaved1F1B(4, 2))],
    ids=str,
)
def test_every_mixture_computes_what_plain_jit_does(schedule: Schedule):
    stages = schedule.num_stages
    kept = numpy(pipelined(schedule, None)(*arguments(stages)))
    tree_allclose(kept, plain(stages), rtol=1e-5)
    moved = pipelined(schedule, [OFFLOAD] * stages, fetch_ahead=2)
    results = numpy(moved(*arguments(stages)))
    text = moved.compile(*arguments(stages)).as_text()
    assert text.count("offload") == text.count("fetch") > schedule.num_ranks
    # Only the place of bytes changes.
    jax.tree.map(np.testing.assert_array_equal, results, kept)
    mixed = [BOTH, HALF, RECOMPUTE, KEEP][:stages]
    # Sums of float32 in another order: XLA fuses the recomputation with the backward.
    tree_allclose(numpy(pipelined(schedule, mixed)(*arguments(stages))), plain(stages), rtol=1e-5)


def test_with_rows_on_several_devices_of_a_rank():
    mesh = mesh_of(2, data=2)
    args = chain(2), batch_of(4)
    plan = ResidualPlan([OFFLOAD, BOTH])
    step = mpmd_jit_with_loop(sgd_step(GPipe(2)), mesh, in_specs=(None, P(None, "data")), residuals=plan)
    tree_allclose(numpy(step(*args)), numpy(jax.jit(sgd_step(None))(*args)), rtol=1e-5)


def test_a_function_gives_one_plan_for_a_compilation():
    """It may measure, or count: all passes, of all loops, have its first answer."""
    answers = [ResidualPlan([StageResiduals(offload=1.0), KEEP]), *[ResidualPlan.keep(2)] * 9]
    counted: list[ResidualPlan] = []

    def residuals() -> ResidualPlan:
        counted.append(answers[len(counted)])
        return counted[-1]

    def two_loops(params: Any, batch: Any) -> Any:
        once = sgd_step(GPipe(2))
        return once(once(params, batch)[0], batch)

    made = built(two_loops, 2, chain(2), batch_of(4), residuals=residuals)
    assert made.settings.residual_plan == answers[0]
    assert "offload" in made.program.as_text()
    assert len(counted) == 1


def test_stage_table_and_text_tell_what_is_kept():
    args = chain(2), batch_of(4)
    kept, again = (
        built(sgd_step(GPipe(2)), 2, *args, residuals=plan) for plan in (None, ResidualPlan([RECOMPUTE, RECOMPUTE]))
    )
    row = args[1]["x"][0].nbytes
    before, after = (
        [s.activation_bytes for s in summarise_stages(step.loops[-1], mesh_of(2))] for step in (kept, again)
    )
    # What the backward reads of the forwards: stage 0 reads the batch alone, stage 1 what stage 0 has sent.
    assert after == [0, row]
    assert all(more > less for more, less in zip(before, after, strict=True))
    texts = [step.loops[0].partition.as_text() for step in (again, kept)]
    assert texts[0].count("tanh") == 2 * texts[1].count("tanh")


def test_a_mask_and_its_zeros_are_no_residuals():
    """A differentiated `jnp.where` is a call that returns them at full size; a backward makes them itself."""

    def masked(params: Any, mb: Any) -> jax.Array:
        x = mb["x"]
        for i, layer in enumerate(params):
            x = mark_stage_end(x) if i else x
            scores = x @ layer["w"]
            mask = jnp.tril(jnp.ones(scores.shape, bool))
            x = jnp.exp(jnp.where(mask, scores, -1e9))
        return jnp.mean((x - mb["y"]) ** 2)

    args = chain(3), batch_of(4)
    step = built(sgd_step(GPipe(3), masked), 3, *args)
    row = args[1]["x"][0].nbytes
    # The batch's own rows are none: what `exp` has made; what a stage was sent; and the loss's difference.
    assert [s.activation_bytes for s in summarise_stages(step.loops[-1], mesh_of(3))] == [row, 2 * row, 3 * row]
    pipelined = mpmd_jit_with_loop(sgd_step(GPipe(3), masked), mesh_of(3))
    tree_allclose(numpy(pipelined(*args)), numpy(jax.jit(sgd_step(None, masked))(*args)), rtol=1e-5)


def test_debug_nans_and_profile_walk_through_the_copies():
    args = chain(2), batch_of(4)
    compiled = mpmd_jit_with_loop(sgd_step(GPipe(2)), mesh_of(2), residuals=ResidualPlan([OFFLOAD] * 2)).compile(*args)
    expected = numpy(compiled(*args))
    results, timings = compiled.profile(*args)
    jax.tree.map(np.testing.assert_array_equal, numpy(results), expected)
    assert len(timings) == 16
    params, batch = jax.tree.map(lambda p: p * np.nan, args[0]), args[1]
    with jax.debug_nans(True):
        compiled(*args)
        with pytest.raises(FloatingPointError, match=r"task fwd_0 \(rank 0, stage 0, microbatch 0\)"):
            compiled(params, batch)


def refused(text: str, plan: ResidualPlan, step: Any = None, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=text):
        mpmd_jit_with_loop(step or sgd_step(GPipe(2)), mesh_of(2), residuals=plan).compile(chain(2), batch_of(4))


def test_refusals():
    refused(r"residuals= of the treduce at .*has 3 entries, but the schedule has 2 stages", ResidualPlan([KEEP] * 3),
            error=ScheduleError)  # fmt: skip

    def loss(params: Any, mb: Any) -> jax.Array:
        x = jnp.tanh(mb["x"] @ params[0]["w"])
        x = x * io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32))
        x = mark_stage_end(x)
        return jnp.mean((x @ params[1]["w"] - mb["y"]) ** 2)

    refused("recomputes the residuals of stage 0, but io_callback at .*test_residuals.py.*side effects.*twice",
            ResidualPlan([RECOMPUTE, KEEP]), sgd_step(GPipe(2), loss))  # fmt: skip


def test_arguments_stay_and_effects_happen_once():
    """Only what a forward makes may move: no argument, donated or not; and an offload runs nothing again."""
    calls: list[None] = []

    def loss(params: Any, mb: Any) -> jax.Array:
        scale = io_callback(lambda: calls.append(None) or np.float32(2), jax.ShapeDtypeStruct((), jnp.float32))
        x = mark_stage_end(jnp.tanh(mb["x"] @ params[0]["w"]) * scale)
        return jnp.mean((x @ params[1]["w"] - mb["y"]) ** 2)

    step = mpmd_jit_with_loop(
        sgd_step(GPipe(2), loss), mesh_of(2), residuals=ResidualPlan([OFFLOAD] * 2), donate_argnums=(0, 1)
    )
    compiled = step.compile(chain(2), batch_of(4))
    jax.block_until_ready(jax.tree.leaves(step(chain(2), batch_of(4))))
    jax.effects_barrier()
    assert len(calls) == 4
    made: dict[int, str] = {}  # the task that made a value, here or before a transfer
    moved = 0
    for instruction in compiled.program.instructions:
        if isinstance(instruction, Run):
            made.update(dict.fromkeys(instruction.outputs, compiled.program.tasks[instruction.task].name))
        elif isinstance(instruction, Transfer) and instruction.memory == HOST_MEMORY:
            moved += len(instruction.sent)
            assert {made.get(value, "an argument")[:4] for value in instruction.sent} == {"fwd_"}
        elif isinstance(instruction, Transfer):
            sent = [made.get(value, "an argument") for value in instruction.sent]
            made.update(zip(instruction.received, sent, strict=True))
    assert moved > 0


def test_a_rank_runs_no_further_ahead_of_a_slow_offload_than_the_plan_says(monkeypatch: pytest.MonkeyPatch):
    """A copy ends late because its forward takes long: the host has long dispatched all tasks that do not wait."""
    copies: list[list[jax.Array]] = []
    leaving: list[int] = []  # before each task of rank 0: the copies to the host that have not ended
    run, to_memory = instruction_loop._run, instruction_loop.to_memory

    def copied(arrays: Any, shardings: Any) -> Any:
        made = to_memory(arrays, shardings)
        if shardings[0].memory_kind == HOST_MEMORY:
            copies.append(made)
        return made

    def watched(executable: Any, inputs: Any, outputs: Any, donated: Any, environment: Any) -> None:
        leaving.append(sum(not all(array.is_ready() for array in made) for made in copies))
        run(executable, inputs, outputs, donated, environment)

    monkeypatch.setattr(instruction_loop, "_run", watched)
    monkeypatch.setattr(instruction_loop, "to_memory", copied)

    def loss(w: Any, x: Any) -> Any:
        slow = jax.lax.fori_loop(0, 100, lambda _, m: jnp.tanh(m @ m), jnp.eye(192) * x.mean())
        x = mark_stage_end(jnp.tanh(x @ w[0] + slow.sum() * 1e-9))
        return jnp.mean(jnp.tanh(x @ w[1]) ** 2)

    def step(w: Any, batch: Any) -> Any:
        return treduce(lambda x: jax.value_and_grad(loss)(w, x), batch, schedule=GPipe(2))

    args = [jnp.eye(4) * 0.5] * 2, jnp.ones((8, 16, 4))
    kept = numpy(mpmd_jit_with_loop(step, mesh_of(2))(*args))
    for within in (1, None):
        copies.clear(), leaving.clear()
        plan = ResidualPlan([OFFLOAD, KEEP], offload_within=within)
        jax.tree.map(
            np.testing.assert_array_equal, numpy(mpmd_jit_with_loop(step, mesh_of(2), residuals=plan)(*args)), kept
        )
        assert len(copies) == 8
        # The copies of the last two forwards, of which the second may run beside the first one's copy.
        assert max(leaving) <= 2 if within else max(leaving) > 2


def test_a_stage_above_a_frozen_one_offloads_under_a_split_backward_too():
    """Such a stage has no task for its input's gradient: its weight gradient is the first reader."""

    def step(frozen: Any, trained: Any, batch: Any) -> Any:
        def loss(trained: Any, mb: Any) -> Any:
            x = mb["x"]
            for i, layer in enumerate([frozen, *trained]):
                x = jnp.tanh((mark_stage_end(x) if i else x) @ layer["w"] + layer["b"])
            return jnp.mean((x - mb["y"]) ** 2)

        return treduce(lambda mb: jax.value_and_grad(loss)(trained, mb), batch, ZeroBubble(3))

    frozen, *trained = chain(3)
    program = built(step, 3, frozen, trained, batch_of(8), residuals=ResidualPlan([KEEP, OFFLOAD, KEEP])).program
    program.verify()
    moved = [i for i in program.instructions if isinstance(i, Transfer) and i.memory]
    assert {i.source for i in moved} == {1}
    assert any(i.memory == HOST_MEMORY for i in moved)
