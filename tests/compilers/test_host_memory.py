"""Optimizer state on the host, on described machines: how the compilers copy it, and what a program holds of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.passes import stream_updates
from jaxpp_flax.planning.compilers.tasks import read_task
from jaxpp_flax.trainers import Memory
from tests.compilers.machines import ONE_HOST, mesh_of
from tests.compilers.small import KERNEL_BYTES, Block, around_loop, compiled_for, told

pytestmark = pytest.mark.compilers

MOMENTS = 2 * KERNEL_BYTES  # of a leaf


class ThreeBlocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List(Block(rngs) for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("machine", ONE_HOST)
def test_moments_are_copied_asynchronously_a_leaf_at_a_time(machine: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream_updates, "WINDOW_BYTES", MOMENTS)
    made = compiled_for(machine, {"data": 2}, ThreeBlocks, memory=Memory(optimizer_state="pinned_host"))
    updates = [task for task in around_loop(told(made)) if any(copy.what == "to host" for copy in task.copies)]
    assert sum(task.runs for task in updates) >= 2 * 6  # kernels
    for task in updates:
        assert all(copy.asynchronous for copy in task.copies if copy.what != "argument")
        # The old moments and the new ones; and the gradient, summed, on NVIDIA's.
        assert task.workspace_bytes <= 2.6 * MOMENTS


@pytest.mark.parametrize("machine", ONE_HOST)
def test_one_program_of_all_leaves(machine: str):
    """The reason for `stream_updates`: a TPU's compiler fetches all moments together, unless a program has few.

    NVIDIA's compiler fetches nothing: its kernels read the memory of the host. A compiler for TPUs that holds less
    makes the pass superfluous.
    """
    mesh = mesh_of(machine, {"stage": 4})
    here = NamedSharding(mesh, P())
    host = here.with_memory_kind("pinned_host")

    def update(weights: list[Any], moments: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        fetched = [jax.device_put(m, jax.memory.Space.Device) for m in moments]
        new = [0.9 * m + g for m, g in zip(fetched, gradients, strict=True)]
        return [w - m for w, m in zip(weights, new, strict=True)], [
            jax.device_put(m, jax.memory.Space.Host) for m in new
        ]

    leaf, leaves = jax.ShapeDtypeStruct((2048, 2048), np.float32), 8
    jitted = jax.jit(update, in_shardings=(here, host, here), out_shardings=(here, host), donate_argnums=(0, 1))
    read = read_task(jitted.lower(*[[leaf] * leaves] * 3).compile())
    large = [copy for copy in read.text.copies if copy.what != "argument"]
    assert all(copy.asynchronous for copy in large)
    assert any(copy.work_beside for copy in large)
    assert any(copy.what == "from host" for copy in large) == machine.startswith("tpu")
    held = read.memory.temp_size_in_bytes / leaf.size / 4
    if machine.startswith("tpu"):
        assert held > leaves, "all old moments, and new ones on their way"
    else:
        assert held < leaves, "new moments on their way"
