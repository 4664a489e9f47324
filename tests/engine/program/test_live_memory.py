"""The bytes that a program holds on devices and on the host, compared with live arrays after every instruction."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.program.live_memory import LiveMemory
from jaxpp_flax.engine.program.program import Instruction
from jaxpp_flax.engine.program.waits import AHEAD
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, treduce
from jaxpp_flax.planning.predicted.placed_step import predict_memory
from jaxpp_flax.schedules import GPipe, Schedule, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly
from tests.engine.test_memory import hidden_loss, live, observe, two_layers
from tests.engine.toys import mesh_of, sgd_step
from tests.helpers import batch_of, slow

STAGES, MICROBATCHES = 3, 5


def step_and_arguments(schedule: Schedule, plan: ResidualPlan | None) -> tuple[MpmdFunction, Any]:
    step = mpmd_jit_with_loop(sgd_step(schedule, hidden_loss), mesh_of(STAGES), residuals=plan)
    return step, (two_layers(STAGES), batch_of(MICROBATCHES, dim=8))


def predicted(compiled: Any) -> list[tuple[list[int], list[int]]]:
    """The live bytes of devices and hosts after each instruction."""
    memory, found = LiveMemory(compiled.program), []
    for instruction in compiled.program.instructions:
        memory.step(instruction, [compiled.executables.nbytes[value] for value in instruction.writes()])
        found.append(([m.live for m in memory.devices], [m.live for m in memory.hosts]))
    return found


def measured(compiled: Any, arguments: Any) -> list[tuple[list[int], list[int]]]:
    """The same on real buffers, by the kind of memory of each live array."""
    devices = {compiled.mpmd_mesh.rank_devices(rank)[0]: rank for rank in range(STAGES)}
    found: list[tuple[list[int], list[int]]] = []
    start: list[int] = []
    gc.collect()
    others = {id(x): x for x in live() if x.sharding.memory_kind == "pinned_host"}  # of tests before this one

    def look(instruction: Instruction, environment: list[Any], done: bool) -> None:
        bytes_of = {"device": [0] * STAGES, "pinned_host": [0] * STAGES}
        held = {id(x): x for x in environment if x is not None and not x.is_deleted()}
        for x in held.values():
            (device,) = x.devices()
            bytes_of[x.sharding.memory_kind or "device"][devices[device]] += x.nbytes
        now_live = (x for x in live() if id(x) not in others)
        on_host = sum(x.nbytes for x in now_live if x.sharding.memory_kind == "pinned_host")
        assert on_host == sum(bytes_of["pinned_host"]), "nothing else keeps an offloaded value"
        start[:] = start or bytes_of["device"]
        if done:
            above = [now - first for now, first in zip(bytes_of["device"], start, strict=True)]
            found.append((above, bytes_of["pinned_host"]))

    observe(compiled, arguments, look)
    return found


OFFLOAD = StageResiduals(offload=1.0)
PLANS = {
    "moved": [OFFLOAD] * STAGES,
    "mixed": [StageResiduals(recompute=True, offload=1.0), StageResiduals(offload=0.5), StageResiduals(recompute=True)],
}


@pytest.mark.parametrize(
    ("schedule", "name", "within"),
    [
        slow(GPipe(STAGES), "moved", None),
        slow(GPipe(STAGES), "moved", 2),
        slow(Std1F1B(STAGES), "mixed", None),
        (ZeroBubble(STAGES), "mixed", 1),
    ],
)
def test_bytes_after_every_instruction_are_those_of_live_arrays(schedule: Schedule, name: str, within: int | None):
    step, arguments = step_and_arguments(schedule, ResidualPlan(PLANS[name], offload_within=within))
    compiled = step.compile(*arguments)
    expected = predicted(compiled)
    assert measured(compiled, arguments) == expected
    host = [max(held[rank] for _, held in expected) for rank in range(STAGES)]
    assert any(host)
    assert [row.host_peak_bytes for row in compiled.memory_analysis()] == host
    assert not any(expected[-1][1]), "all that was offloaded is fetched"


@pytest.mark.parametrize("forward_only", [True, False], ids=["forwards", "training"])
def test_what_a_sender_in_another_process_holds(forward_only: bool):
    """A receiver that sends nothing back leaves four transfers with the sender, beside what the program holds."""
    activation = 2 * 16 * 4  # what a transfer carries

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(mark_stage_end(x @ w[0]) @ w[1])

        if forward_only:
            return treduce(lambda x: loss(w, x), x, ForwardOnly(GPipe(2)), operation=Add)
        return treduce(lambda x: jax.value_and_grad(loss)(w, x), x, Std1F1B(2), operation=Add)

    arguments = [np.zeros((4, 16), np.float32), np.zeros((16, 3), np.float32)], np.zeros((12, 2, 4), np.float32)
    compiled = mpmd_jit_with_loop(step, mesh_of(2)).compile(*arguments)
    walks = [LiveMemory(compiled.program, processes=processes) for processes in ((), [frozenset({0}), frozenset({1})])]
    for instruction in compiled.program.instructions:
        for memory in walks:
            memory.step(instruction, [compiled.executables.nbytes[value] for value in instruction.writes()])
    (first, second), (sender, receiver) = (memory.devices for memory in walks)
    # In training, what comes back ends what is in flight: one transfer at a time, in each direction.
    ahead, back = (AHEAD, 0) if forward_only else (1, 1)
    assert sender.peak - first.peak == ahead * activation
    assert receiver.peak - second.peak == back * activation


def test_offloaded_residuals_leave_the_devices():
    """With GPipe, every forward ends before the first backward: the devices hold two or three of five microbatches."""
    found: list[Any] = []
    for plan in (ResidualPlan(PLANS["moved"]), None):
        step, arguments = step_and_arguments(GPipe(STAGES), plan)
        found.append(predict_memory(step.place(*arguments)))
    for less, more in zip(*found, strict=True):
        assert less.peak_bytes < more.peak_bytes
        assert less.host_peak_bytes > more.host_peak_bytes == 0
