"""Memory: how many microbatches' activations each stage holds, counted by the program and on real buffers."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.program.program import Instruction, Run
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B
from tests.engine.toys import chain, mesh_of, sgd_step
from tests.helpers import ROWS, batch_of, slow

STAGES, MICROBATCHES = 3, 5
DIM, HIDDEN = 8, 24  # no other array of a step has the shape of a hidden activation


def two_layers(num_stages: int) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    return [
        {
            "in": jnp.asarray(rng.normal(size=(DIM, HIDDEN)), jnp.float32),
            "out": jnp.asarray(rng.normal(size=(HIDDEN, DIM)), jnp.float32),
        }
        for _ in range(num_stages)
    ]


def hidden_loss(params: Any, batch: Any) -> jax.Array:
    """Each stage keeps what is hidden in it, and sends on something of another shape."""
    x = batch["x"]
    for i, p in enumerate(params):
        if i:
            x = mark_stage_end(x)
        x = jnp.tanh(x @ p["in"]) @ p["out"]
    return jnp.mean((x - batch["y"]) ** 2)


def hidden_step(params: Any, batch: Any, schedule: Schedule) -> Any:
    return sgd_step(schedule, hidden_loss)(params, batch)


@functools.cache
def pipelined(num_ranks: int) -> MpmdFunction:
    """One function for all schedules, so that they share the executables of equal tasks."""
    return mpmd_jit_with_loop(hidden_step, mesh_of(num_ranks), static_argnums=2)


def compiled_step(schedule: Schedule) -> CompiledPipeline:
    arguments = two_layers(schedule.num_stages), batch_of(MICROBATCHES, dim=DIM)
    return pipelined(schedule.num_ranks).compile(*arguments, schedule)


def observe(
    compiled: CompiledPipeline, arguments: tuple[Any, ...], look: Callable[[Instruction, list[Any], bool], None]
) -> Any:
    """Run a step and call `look(instruction, environment, done)` before and after every instruction."""
    runtime = compiled.runtime
    plain = runtime._steps

    def watched(instruction: Instruction, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        def run(environment: list[Any]) -> None:
            look(instruction, environment, False)
            step(environment)
            look(instruction, environment, True)

        return run

    runtime._steps = [watched(i, s) for i, s in zip(runtime.program.instructions, plain, strict=True)]
    try:
        return compiled(*arguments)
    finally:
        runtime._steps = plain


def live() -> list[jax.Array]:
    return [x for x in jax.live_arrays() if not x.is_deleted()]


def per_microbatch(compiled: CompiledPipeline, stage: int) -> int:
    """How many hidden arrays the forward of a stage keeps for its backward."""
    (forward,) = [t for t in compiled.program.tasks if t.name == f"fwd_{stage}"]
    return sum(a.aval.shape == (ROWS, HIDDEN) for a in forward.graph.outputs)


def held_by_rank(compiled: CompiledPipeline, schedule: Schedule) -> dict[int, int]:
    """The most hidden arrays that are alive on each rank's device at one time."""
    devices = {compiled.mpmd_mesh.rank_devices(r)[0]: r for r in range(schedule.num_ranks)}
    most: Counter[int] = Counter()

    def look(instruction: Instruction, environment: list[Any], done: bool) -> None:
        now = Counter(devices[d] for x in live() if x.shape == (ROWS, HIDDEN) for d in x.devices())
        for rank, number in now.items():
            most[rank] = max(most[rank], number)

    arguments = two_layers(schedule.num_stages), batch_of(MICROBATCHES, dim=DIM)
    observe(compiled, arguments, look)
    return dict(most)


@pytest.fixture(scope="module", params=[GPipe, Std1F1B, slow(Eager1F1B)], ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest) -> tuple[Schedule, CompiledPipeline]:
    schedule = request.param(STAGES)
    return schedule, compiled_step(schedule)


def bound(schedule: Schedule, stage: int) -> int:
    """Written out for the two schedules that issue 2 gives numbers for."""
    if isinstance(schedule, GPipe):
        return MICROBATCHES
    if type(schedule) is Std1F1B:
        return min(STAGES - stage, MICROBATCHES)
    return schedule.max_live_microbatches(stage, MICROBATCHES)


def test_live_microbatches_on_real_buffers(case: tuple[Schedule, CompiledPipeline]):
    schedule, compiled = case
    held = held_by_rank(compiled, schedule)
    fused = isinstance(schedule, (Std1F1B, Eager1F1B))
    for stage in range(STAGES):
        if fused and stage == STAGES - 1:
            assert held.get(stage, 0) == 0  # its forward and backward are one task, which keeps them to itself
        else:
            assert per_microbatch(compiled, stage) > 0
            assert held[stage] == bound(schedule, stage) * per_microbatch(compiled, stage)


def check_bytes(compiled: CompiledPipeline, arguments: tuple[Any, ...]) -> None:
    """Compare the analysis with the bytes that are alive on each device after every instruction."""
    analysis = compiled.memory_analysis()
    devices = [compiled.mpmd_mesh.rank_devices(row.rank)[0] for row in analysis]
    peak = [0] * len(devices)
    start: list[int] = []

    def look(instruction: Instruction, environment: list[Any], done: bool) -> None:
        now = [0] * len(devices)
        for x in {id(x): x for x in environment if x is not None and not x.is_deleted()}.values():
            for device in x.devices():
                now[devices.index(device)] += x.nbytes
        start[:] = start or now
        peak[:] = map(max, peak, now)

    observe(compiled, arguments, look)
    assert [row.peak_bytes for row in analysis] == [p - s for p, s in zip(peak, start, strict=True)]


def test_bytes_are_those_of_real_buffers(case: tuple[Schedule, CompiledPipeline]):
    _, compiled = case
    params, batch = arguments = two_layers(STAGES), batch_of(MICROBATCHES, dim=DIM)
    check_bytes(compiled, arguments)
    data = batch["x"].nbytes
    assert [row.argument_bytes for row in compiled.memory_analysis()] == [
        sum(x.nbytes for x in p.values()) + data * (rank in (0, STAGES - 1)) for rank, p in enumerate(params)
    ]


def test_interleaved_stages_of_one_rank_share_its_memory():
    schedule = Interleaved1F1B(4, 2)
    compiled = compiled_step(schedule)
    found = [schedule.max_live_microbatches(s, MICROBATCHES) for s in range(4)]
    held = held_by_rank(compiled, schedule)
    # Stages 0 and 2 share rank 0: what it holds at one time is at most the sum of what each holds at its own peak.
    assert held[0] <= sum(found[s] * per_microbatch(compiled, s) for s in (0, 2))
    assert held[0] >= found[0] * per_microbatch(compiled, 0)


def test_accumulators_are_updated_in_place(case: tuple[Schedule, CompiledPipeline]):
    _, compiled = case
    checked = 0
    before: list[Any] = []
    addresses: list[int] = []

    def look(instruction: Instruction, environment: list[Any], done: bool) -> None:
        nonlocal checked
        if not isinstance(instruction, Run) or instruction.microbatch < 0:
            return
        task = compiled.program.tasks[instruction.task]
        states = {position for _, position in task.pins}
        assert states <= task.donate
        if not done:
            before[:] = [environment[instruction.inputs[p]] for p in sorted(states)]
            assert not any(x.is_deleted() for x in before)
            addresses[:] = [x.unsafe_buffer_pointer() for x in before]
        else:
            checked += len(before)
            assert all(x.is_deleted() for x in before)
            after = {position: environment[instruction.outputs[output]] for output, position in task.pins}
            # Deleted is not enough: XLA may take a donated buffer and write to another one.
            assert [after[p].unsafe_buffer_pointer() for p in sorted(states)] == addresses

    observe(compiled, (two_layers(STAGES), batch_of(MICROBATCHES, dim=DIM)), look)
    assert checked == MICROBATCHES * (2 * STAGES + 1)  # two gradients for each stage, and the losses


@pytest.fixture(scope="module")
def donating() -> Any:
    return mpmd_jit_with_loop(sgd_step(Std1F1B(3)), mesh_of(3), donate_argnums=0)


def test_nothing_leaks(donating: Any):
    params, batch = chain(3), batch_of(3)
    counts = []
    for _ in range(100):
        params, _, _ = donating(params, batch)
        counts.append(len(live()))
    gc.collect()
    assert counts[2] == counts[-1], "the number of live arrays grows with the steps"


def test_donated_arguments_are_deleted_and_others_are_not(donating: Any):
    params, batch = chain(3), batch_of(3)
    first, _, _ = donating(params, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    second, _, _ = donating(first, batch)
    leaves = jax.tree.leaves(first)
    assert leaves
    assert all(isinstance(x, MpmdArray) and x.is_deleted() for x in leaves)
    assert not any(x.is_deleted() for x in jax.tree.leaves((second, batch)))


def test_donated_arguments_make_room(donating: Any):
    params, _, _ = donating(chain(3), batch_of(3))
    check_bytes(donating.compile(params, batch_of(3)), (params, batch_of(3)))


def test_without_donation_arguments_keep_their_values():
    step = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2))
    params, batch = chain(2), batch_of(2)
    copies = jax.tree.map(np.array, (params, batch))
    first = step(params, batch)
    kept = jax.tree.map(np.array, first)
    for _ in range(3):
        again = step(first[0], batch)
    repeated = step(params, batch)
    jax.tree.map(np.testing.assert_array_equal, (params, batch), copies)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, first), kept)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, repeated), kept)
    assert not np.array_equal(jax.tree.leaves(again)[0], jax.tree.leaves(first)[0])
