"""Copies between the memories of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays import memory_kinds, placing
from jaxpp_flax.engine.arrays.placing import to_memory
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Free, Instruction, Wait
from jaxpp_flax.engine.runtime import instruction_loop
from jaxpp_flax.schedules import GPipe
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from tests.engine.test_memory import observe
from tests.engine.toys import chain, mesh_of, sgd_step
from tests.helpers import batch_of


def test_there_and_back():
    device = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    host = device.with_memory_kind("pinned_host")
    array = jax.device_put(np.arange(8.0, dtype=np.float32), device)
    for move in (to_memory, lambda arrays, to: [placing._shards_to_memory(arrays[0], to[0])]):
        [there] = move([array], [host])
        assert there.sharding == host
        [back] = move([there], [device])
        assert back.sharding == device
        np.testing.assert_array_equal(back, array)


def test_a_platform_without_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_kinds, "kinds_of", lambda device: {"device", "unpinned_host"})
    step = mpmd_jit_with_loop(
        sgd_step(GPipe(2)), mesh_of(2), residuals=ResidualPlan([StageResiduals(offload=0.5), StageResiduals()])
    )
    text = (
        "a ResidualPlan that offloads asks for the memory kind 'pinned_host', which .* it has 'device', 'unpinned_host'"
    )
    with pytest.raises(ValueError, match=rf"{text}"):
        step.compile(chain(2), batch_of(4))


def test_a_value_is_offloaded_in_several_processes_too():
    """What a rank moves between its own memories is not sent."""
    step = mpmd_jit_with_loop(sgd_step(GPipe(2)), mesh_of(2), residuals=ResidualPlan([StageResiduals(offload=1.0)] * 2))
    compiled = step.compile(chain(2), batch_of(4))
    instruction_loop._refuse_other_memory(compiled.program, compiled.executables)


class SlowCopy:
    """A copy to the host that ends only when someone waits for it; until then the source stays in memory."""

    def __init__(self, copy: jax.Array, source: jax.Array) -> None:
        self.copy, self.nbytes, self.source = copy, source.nbytes, id(source)
        self.has_ended = False

    def block_until_ready(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("within", [1, 2, None])
def test_with_a_slow_link_the_devices_hold_what_is_predicted_if_the_plan_waits(
    monkeypatch: pytest.MonkeyPatch, within: int | None
):
    plan = ResidualPlan([StageResiduals(offload=1.0)] * 2, offload_within=within)
    arguments = chain(2), batch_of(6)
    compiled = mpmd_jit_with_loop(sgd_step(GPipe(2)), mesh_of(2), residuals=plan).compile(*arguments)
    expected = jax.tree.map(np.asarray, compiled(*arguments))
    copies: list[SlowCopy] = []

    def slow(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
        if isinstance(arrays[0], SlowCopy):  # a fetch starts when its offload has ended
            for array in arrays:
                array.block_until_ready()
            return to_memory([array.copy for array in arrays], shardings)
        made = [SlowCopy(copy, array) for copy, array in zip(to_memory(arrays, shardings), arrays, strict=True)]
        copies.extend(made)
        return made

    in_use: list[int] = []  # after each free: the bytes of sources that the program has freed, and that are still read

    def look(instruction: Instruction, environment: list[Any], done: bool) -> None:
        if done and isinstance(instruction, Free):
            held = {id(x) for x in environment}
            in_use.append(sum(c.nbytes for c in copies if not c.has_ended and c.source not in held))

    monkeypatch.setattr(instruction_loop, "to_memory", slow)
    compiled.runtime = instruction_loop.Runtime(compiled.executables)
    results = observe(compiled, arguments, look)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, results), expected)
    assert copies
    # Live arrays are as predicted (tests/engine/program/test_live_memory.py); this is what devices hold beyond them.
    assert (max(in_use) == 0) == (within is not None)
    assert ("wait for v" in compiled.as_text()) == (within is not None)
    assert any(isinstance(i, Wait) for i in compiled.program.instructions) == (within is not None)


def test_waits_do_not_hold_up_ranks_that_run_side_by_side():
    plan = ResidualPlan([StageResiduals(offload=1.0)] * 2, offload_within=1)
    arguments = chain(2), batch_of(6)
    compiled = mpmd_jit_with_loop(sgd_step(GPipe(2)), mesh_of(2), residuals=plan).compile(*arguments)
    results, timings = compiled.profile(*arguments)
    expected = jax.tree.map(np.asarray, compiled(*arguments))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, results), expected)
    assert len(timings) == 24
