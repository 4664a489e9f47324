"""Copies between the memories of a rank."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays import memory_kinds
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.runtime import host_memory, instruction_loop
from jaxpp_flax.engine.runtime.host_memory import to_memory
from jaxpp_flax.schedules import GPipe
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from tests.engine.toys import chain, mesh_of, sgd_step
from tests.helpers import batch_of


def test_there_and_back():
    device = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    host = device.with_memory_kind("pinned_host")
    array = jax.device_put(np.arange(8.0, dtype=np.float32), device)
    for move in (to_memory, lambda arrays, to: [host_memory._shards_to_memory(arrays[0], to[0])]):
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
    instruction_loop._refuse_other_memory(compiled.program, compiled._executables)
